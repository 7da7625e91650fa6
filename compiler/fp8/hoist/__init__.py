"""Hoist float8 casts that a graph already has: move them in front of its all_gathers."""
