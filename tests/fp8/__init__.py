"""Tests of float8: insertion, hoisting, state, numerics."""
