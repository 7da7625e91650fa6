"""Measurements that stand in docs/. Never tests: timings gate nothing."""
