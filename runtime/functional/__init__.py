"""The ops as functions with gradients, for hand-written layers: `ub_overlap.all_gather_matmul`, ...

    groups.py    resolves the group and its device
    layout.py    checks arguments and turns them into the two-dimensional arguments of the ops
    gather.py    all_gather_matmul       forward: gather op; backward: the sum's scatter and the weights' gradients, overlapped
    scatter.py   matmul_reduce_scatter   forward: scatter op; backward: one gather op
    reduce.py    matmul_all_reduce       backward: local
    plain.py     strategy="none": c10d's functional collectives and matmuls
    handles.py   all_gather, reduce_scatter, all_reduce, all_to_all with async_op=True, without gradients
    arena.py     initialize_group and check_errors

They use the same sessions and schedules, and raise the same errors, as compiled graphs. torch.compile can trace them.
"""

from __future__ import annotations

from .arena import check_errors, initialize_group
from .gather import all_gather_matmul
from .handles import CollectiveHandle, all_gather, all_reduce, all_to_all, reduce_scatter
from .reduce import matmul_all_reduce
from .scatter import matmul_reduce_scatter

__all__ = [
    "CollectiveHandle",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "check_errors",
    "initialize_group",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
]
