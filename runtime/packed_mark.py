"""The mark of parameters that `ub_overlap.pack` has put next to each other."""

MARK = "_ub_overlap_packed"
"""Attribute of packed parameters. Memory allocators may put weights next to each other by chance, on some ranks only."""
