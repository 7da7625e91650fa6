"""Cases of collectives that are two ops, a start and a finish: split, coalesced, all_to_all. For tests/gpu/cases.py.

A case is (op of the start, its arguments up to the strategy). Its outputs are those of the finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import ops

if TYPE_CHECKING:
    from .cases import Case, Maker

SPLIT, COALESCED, EXCHANGE = "start_collective", "start_coalesced", "start_all_to_all"
FINISH = {SPLIT: "finish_collective", COALESCED: "finish_coalesced", EXCHANGE: "finish_all_to_all"}
OPS = torch.ops.ub_overlap
COLLECTIVES = {"AG": "all_gather", "RS": "reduce_scatter", "AR": "all_reduce"}
KINDS = (*(f"split {name}" for name in COLLECTIVES), "coalesced", "A2A", "A2A rounds", "A2A step", "A2A order")
"""Exchanges: of equal pieces; of pieces that take rounds; a step of a ring, which has one area; a result in another order."""
PIECE_BYTES = 16 << 20
"""Bytes of a piece of "A2A rounds": many times the first areas of a slot."""


def split(
    x: Tensor, collective: str, by: str = "sum", out_dtype: torch.dtype | None = None, slot: int = 0, zero_copy: bool = False
) -> Case:
    """Return the case of a split collective."""
    return SPLIT, (x, collective, by, out_dtype or x.dtype, slot, zero_copy)


def coalesced(
    tensors: list[Tensor],
    collective: str,
    by: str = "sum",
    out_dtypes: list[torch.dtype] | None = None,
    slot: int = 0,
    zero_copy: bool = False,
) -> Case:
    """Return the case of one collective of several tensors."""
    return COALESCED, (tensors, collective, by, out_dtypes or [x.dtype for x in tensors], slot, zero_copy)


def exchange(
    x: Tensor,
    output_splits: list[int],
    input_splits: list[int],
    slot: int = 0,
    one_area: bool = False,
    order: Tensor | None = None,
) -> Case:
    """Return the case of an all_to_all. `order` is an argument of the finish alone."""
    return EXCHANGE, (x, output_splits, input_splits, slot, one_area, order)


def make_kind(make: Maker, name: str, size: int, dtype: torch.dtype) -> tuple[Case, str]:
    """Return a typical case of KINDS and its strategy."""
    wide, first = 2 * size, name.split()[0]
    if first == "split":
        return split(make.randn(size * make.ranks, wide, dtype=dtype), COLLECTIVES[name.split()[1]]), "bulk"
    if first == "coalesced":
        tensors = [make.randn(rows * make.ranks, wide, dtype=dtype) for rows in (size, 1, size // 2)]
        return coalesced(tensors, "reduce_scatter"), "bulk"
    rows = PIECE_BYTES // (wide * dtype.itemsize) if name == "A2A rounds" else size
    splits = [rows] * make.ranks
    x = make.randn(rows * make.ranks, wide, dtype=dtype)
    if name == "A2A step":
        me = dist.get_rank()
        received, sent = ([x.shape[0] if rank == (me + to) % make.ranks else 0 for rank in range(make.ranks)] for to in (-1, 1))
        return exchange(x, received, sent, one_area=True), "bulk"
    order = torch.arange(x.shape[0] - 1, -1, -1, device=x.device) if name == "A2A order" else None
    return exchange(x, splits, splits, order=order), "bulk"


def with_small_pieces(case: Case) -> Case:
    """Return an exchange of one row each. As the first call of a site it makes small areas, so larger pieces take rounds."""
    x, splits, _, *others = case[1]
    ones = [1] * len(splits)
    assert others[-1] is None, "an order has the numbers of the large pieces' rows"
    return EXCHANGE, (x[: len(ones)].clone(), ones, ones, *others)


def start(case: Case, strategy: str, group: str, site: str) -> Tensor:
    """Run the first op and return its token."""
    arguments = case[1][:-1] if case[0] == EXCHANGE else case[1]
    return getattr(OPS, case[0])(*arguments, strategy, group, site)


def finish(token: Tensor, case: Case, strategy: str, group: str, site: str) -> list[Tensor]:
    """Run the second op and return its outputs. A zero-copy gather is copied and released."""
    if case[0] == EXCHANGE:
        return [OPS.finish_all_to_all(token, *case[1][:-1], strategy, group, site, case[1][-1])]
    out = getattr(OPS, FINISH[case[0]])(token, *case[1], strategy, group, site)
    outs = [out] if isinstance(out, Tensor) else list(out)
    if not case[1][-1]:
        return outs
    slot, copies = case[1][-2], [x.clone() for x in outs]
    release = OPS.release_coalesced if case[0] == COALESCED else OPS.release_collective
    release(out, slot, strategy, group, site)
    return copies


def run_plain(case: Case, group: str) -> list[Tensor]:
    """Compute the same outputs with c10d's collectives."""
    if case[0] == EXCHANGE:
        x, output_splits, input_splits, *_, order = case[1]
        out = _exchange(x, output_splits, input_splits, group)
        return [out if order is None else out[order]]
    tensors, collective, by, dtypes, *_ = case[1]
    pairs = zip(tensors, dtypes, strict=True) if case[0] == COALESCED else [(tensors, dtypes)]
    return [ops.run_fallback("bulk", x, [], [], collective, by, dtype, "none", group, "/fallback")[0] for x, dtype in pairs]


def _exchange(x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str) -> Tensor:
    out = x.new_empty((sum(output_splits), *x.shape[1:]))
    width: Any = x.shape[1:].numel() * x.element_size()
    into, of = (t.contiguous().view(-1).view(torch.uint8).view(-1, width) for t in (out, x))
    dist.all_to_all_single(into, of, list(output_splits), list(input_splits), group=compat.group_of(group))
    return out
