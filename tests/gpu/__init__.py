"""Tests of the executors on real devices."""
