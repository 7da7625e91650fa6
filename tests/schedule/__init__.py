"""Tests of runtime/schedule: builders, proofs, mutations, the reference executor, encoding."""
