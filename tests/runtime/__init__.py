"""Tests of the runtime: real processes, gloo, shared memory."""
