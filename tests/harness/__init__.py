"""Shared test helpers: pools of ranks, graph traces, comparisons."""
