"""Layers of a mixture of experts under expert parallelism."""
