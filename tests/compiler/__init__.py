"""Tests of the compiler on graphs that torch traces at test time."""
