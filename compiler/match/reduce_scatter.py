"""Sum of matmuls -> reduce_scatter.

mm -> [view | permute | cast]* -> reduce_scatter_tensor -> wait                           scatter dim 0, weight gradients
mm -> view -> split(dim d) -> getitem* -> cat(dim 0) -> reduce_scatter_tensor -> wait     scatter dim d (or slice* -> cat)
"""

from __future__ import annotations

from torch.fx import Node

from ..plan.reasons import Reason
from .collectives import Collective
from .reduction import ReducedSum, check_scales, find_reduced_sum, has_scales
from .site import Miss, Reduction


def match_reduce_scatter(c: Collective, position: dict[Node, int]) -> Reduction | Miss:
    """Return the reduce_scatter with the matmuls that it sums, or the reason why there are none."""
    reduced = find_reduced_sum(c, can_regroup=True)
    if isinstance(reduced, Miss):
        return reduced
    blocks = reduced.chain.blocks
    if blocks.rows(reduced.rows, reduced.cols) is not None:
        shard_dim_is_last = False
    elif blocks.shard_dim_is_last(reduced.rows, reduced.cols):
        shard_dim_is_last = True
    else:
        return Miss(Reason.LAYOUT, f"a shard is not a block of the rows or columns of {reduced.terms[0].node.name}")
    if has_scales(reduced) and (miss := _check_float8(reduced, shard_dim_is_last)) is not None:
        return miss
    return reduced.site(shard_dim_is_last)


def _check_float8(reduced: ReducedSum, shard_dim_is_last: bool) -> Miss | None:
    """Return the reason if the op for float8 terms cannot scatter this sum."""
    if (miss := check_scales(reduced)) is not None:
        return miss
    if shard_dim_is_last:
        return Miss(Reason.SCALED_FORM, "float8 matmuls are scattered by rows only")
    if reduced.kept_nodes:
        return Miss(Reason.SCALED_FORM, f"{reduced.kept_nodes[0].name}, before the sum over ranks, is needed as well")
    return None
