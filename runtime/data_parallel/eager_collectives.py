"""Collectives into given memory, in the current stream: a split collective that is finished at once.

A gather and a reduction have slots of their own, so neither waits for the peers to leave the other's. On CUDA the executor runs
eager calls of a group in the order of issue, on all streams. Pushes are copy engine work; the sums are kernels. The groups are
those of served_groups.py, whose slots these files alone use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers the ops)
from ..schedule.steps import HANDLE_SLOTS, PLAN_SLOTS

OPS = torch.ops.ub_overlap
REDUCED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the transport sums."""
GATHERED_DTYPES = (*REDUCED_DTYPES, torch.float8_e4m3fn)
"""Dtypes of the transport's gathers. They move bytes: others travel as the last one."""
GATHER_SLOT, SCATTER_SLOT, *REDUCE_SLOTS = HANDLE_SLOTS
LANDING_SLOTS = PLAN_SLOTS[:4]
"""Slots whose landing memory holds results of FSDP2 (landing_slots.py), in order of use."""
PIECE_BYTES = 1 << 26
"""Bytes of a piece of an all_reduce, at most: its landing memory is twice that."""
_PIECE_STEP = 512
"""Elements: a piece begins at a multiple of them, so its address is as aligned as that of the tensor."""


def as_gathered(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor with one dim in a dtype that the transport gathers."""
    return tensor if tensor.dtype in GATHERED_DTYPES else tensor.view(GATHERED_DTYPES[-1])


def gather_into(out: Tensor, shard: Tensor, group: str, site: str) -> None:
    """All-gather `shard` [n] into `out` [R * n], of which it may be this rank's place. Any dtype."""
    _run(as_gathered(out), as_gathered(shard), "all_gather", "sum", GATHER_SLOT, group, site)


def reduce_scatter_into(out: Tensor, whole: Tensor, group: str, site: str, *, op: str = "sum", factor: float = 1.0) -> None:
    """Sum `whole` [R * n] over ranks in fp32, multiply by `factor`, round once, and write this rank's shard to `out` [n].

    `op`: "sum", or "avg", which divides by R.
    """
    total = out if factor == 1.0 or out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)
    _run(total, whole, "reduce_scatter", op, SCATTER_SLOT, group, site)
    if factor != 1.0:
        total.mul_(factor)
    if total is not out:
        out.copy_(total)


def all_reduce_into(out: Tensor, term: Tensor, group: str, site: str, *, op: str = "sum", index: int = 0) -> None:
    """Sum `term` [n] over ranks in fp32 into `out` [n], which may be `term`. "avg" divides by R. Sums travel in `out`'s dtype.

    Pieces of at most PIECE_BYTES run one after the other, each in the next of the REDUCE_SLOTS from slot `index` modulo their
    number. Ranks pass the same `index`.
    """
    outs, terms = (tensor.split(piece_size(term)) for tensor in (out, term))
    for place, (result, piece) in enumerate(zip(outs, terms, strict=True), index):
        _run(result, piece, "all_reduce", op, REDUCE_SLOTS[place % len(REDUCE_SLOTS)], group, site)


def piece_size(tensor: Tensor) -> int:
    """Return the elements of a piece of an all_reduce of `tensor` [n]. All pieces but the last have them."""
    numel = max(1, tensor.numel())
    pieces = -(-numel * tensor.itemsize // PIECE_BYTES)
    return numel if pieces == 1 else -(-numel // (pieces * _PIECE_STEP)) * _PIECE_STEP


def _run(out: Tensor, input: Tensor, collective: str, op: str, slot: int, group: str, site: str) -> None:
    token = OPS.start_collective(input, collective, op, out.dtype, slot, False, "bulk", group, site)
    OPS.finish_collective_into(token, input, out, collective, op, slot, "bulk", group, site)
