"""Models whose sites are known from their structure.

Each module has `build(rank, world, **variant) -> Case`.
"""
