"""Match the collectives of a graph with the matmuls that can hide them.

One file per kind of collective: all_gather.py, reduce_scatter.py, all_reduce.py. `candidates.MATCHERS` registers them.
"""

from .candidates import find_candidates
from .fused import fused_forms
from .site import Bulk, Candidate, Consumer, Fused, Gather, GatheredAlias, Miss, Reduction, Site, Split

__all__ = [
    "Bulk", "Candidate", "Consumer", "Fused", "Gather", "GatheredAlias", "Miss", "Reduction", "Site", "Split",
    "find_candidates", "fused_forms",
]  # fmt: skip
