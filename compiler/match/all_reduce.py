"""Sum of matmuls -> all_reduce.

mm -> [view | permute | cast]* -> all_reduce -> wait                                      every rank gets the whole sum
"""

from __future__ import annotations

from torch.fx import Node

from ..plan.reasons import Reason
from .collectives import Collective
from .reduction import check_scales, find_reduced_sum, has_scales
from .site import Miss, Reduction


def match_all_reduce(c: Collective, position: dict[Node, int]) -> Reduction | Miss:
    """Return the all_reduce with the matmuls that it sums, or the reason why there are none."""
    reduced = find_reduced_sum(c, can_regroup=False)
    if isinstance(reduced, Miss):
        return reduced
    if has_scales(reduced):
        return check_scales(reduced) or Miss(Reason.SCALED_FORM, "float8 matmuls are scattered by rows only")
    return reduced.site(shard_dim_is_last=False)
