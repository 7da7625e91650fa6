"""The ops `torch.ops.ub_overlap.*`: loads the extension that implements them, and tells torch their shapes.

Importing this module registers the ops. It starts no process group and touches no device; sessions are made at first calls.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from .. import errors, settings
from .. import verify as verify  # registers ub_overlap::compare
from ..extension import extension
from ..session import session
from . import c10d_fallback
from . import fp8_delayed as fp8_delayed  # registers the ops of delayed scaling
from . import fp8_weight as fp8_weight  # registers ub_overlap::fp8_weight


class Provider:
    """Schedules for C++. A key that is new is also proven to share an arena with every key of its group size met before:
    calls of one group follow each other in any order."""

    def __init__(self) -> None:
        self._met: set[tuple[Any, ...]] = set()
        self._lock = threading.Lock()  # two threads with a new key each: one of them has to prove the pair

    def __call__(self, key: tuple[Any, ...], rank: int) -> list[tuple[int, ...]]:
        from ..schedule.encode import prove_pair, provide

        with self._lock:
            steps = provide(key, rank)
            for other in self._met:
                if other != key and other[1] == key[1]:
                    prove_pair(key, other)
            self._met.add(key)
        return steps


def load() -> Any:
    """The extension, its ops registered (importing this module did that)."""
    return extension()


def _group_size(group: str) -> int:
    from ub_overlap import _torch_compat

    return _torch_compat.group_of(group).size()


def _empty(like: Tensor, sizes: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(tuple(sizes), dtype=dtype or like.dtype)


def _fake_all_gather_matmul(
    shard: Tensor,
    operands: Sequence[Tensor],
    modes: Sequence[int],
    outer: int,
    last: bool,
    keep: bool,
    strategy: str,
    group: str,
    site: str,
) -> tuple[Tensor, list[Tensor]]:
    ranks = _group_size(group)
    rows: Any = 1
    for size in shard.shape[:-1]:
        rows = rows * size
    cols: Any = shard.shape[-1]
    rows, cols = (rows, cols * ranks) if last else (rows * ranks, cols)
    outs = []
    for operand, mode in zip(operands, modes, strict=True):
        compat.check(operand.shape[0] == (rows if mode >= 2 else cols), lambda: "an operand does not fit the gathered matrix")
        sizes = (cols if mode >= 2 else rows, operand.shape[1])
        outs.append(_empty(operand, sizes[::-1] if mode % 2 else sizes))
    return _empty(shard, (rows, cols) if keep else (0,)), outs


def _fake_all_gather_scaled_matmul(
    shard: Tensor,
    shard_scale: Tensor,
    operands: Sequence[Tensor],
    operand_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outer: int,
    keep: bool,
    out_dtypes: Sequence[torch.dtype],
    fast_accum: bool,
    strategy: str,
    group: str,
    site: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    rows: Any = _group_size(group)
    for size in shard.shape[:-1]:
        rows = rows * size
    outs = []
    for operand, dtype in zip(operands, compat.dtypes(out_dtypes), strict=True):
        compat.check(operand.shape[0] == shard.shape[-1], lambda: "an operand does not fit the gathered matrix")
        outs.append(_empty(shard, (rows, operand.shape[1]), dtype))
    # One scale fits all of an operand, or each of its columns has one.
    single = operand_scales[0].numel() == 1 if len(operands) else shard_scale.numel() == 1
    scale = _empty(shard, (rows, 1) if keep and not single else (0,), torch.float32)
    return _empty(shard, (rows, shard.shape[-1]) if keep else (0,)), scale, outs


def _fake_matmul_reduce_scatter(
    lhs: Sequence[Tensor],
    rhs: Sequence[Tensor],
    addend: Tensor | None,
    outer: int,
    last: bool,
    reduce_op: str,
    out_dtype: torch.dtype,
    keep: bool,
    strategy: str,
    group: str,
    site: str,
    *,
    wire: str = "plain",
) -> tuple[Tensor, Tensor]:
    ranks = _group_size(group)
    rows, cols = lhs[0].shape[0], rhs[0].shape[1]
    compat.check((cols if last else rows) % ranks == 0, lambda: "the product cannot be scattered evenly")
    out = (rows, cols // ranks) if last else (rows // ranks, cols)
    return _empty(lhs[0], out, out_dtype), _empty(lhs[0], (rows, cols) if keep else (0,))


def _fake_scaled_matmul_reduce_scatter(
    lhs: Sequence[Tensor],
    rhs: Sequence[Tensor],
    lhs_scales: Sequence[Tensor],
    rhs_scales: Sequence[Tensor],
    addend: Tensor | None,
    outer: int,
    reduce_op: str,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    fast_accum: bool,
    wire: str,
    strategy: str,
    group: str,
    site: str,
) -> Tensor:
    ranks, rows = _group_size(group), lhs[0].shape[0]
    compat.check(rows % ranks == 0, lambda: "the product cannot be scattered evenly")
    return _empty(lhs[0], (rows // ranks, rhs[0].shape[1]), out_dtype)


def _fake_matmul_all_reduce(
    lhs: Sequence[Tensor],
    rhs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    out_dtype: torch.dtype,
    keep: bool,
    strategy: str,
    group: str,
    site: str,
) -> tuple[Tensor, Tensor]:
    sizes = (lhs[0].shape[0], rhs[0].shape[1])
    return _empty(lhs[0], sizes, out_dtype), _empty(lhs[0], sizes if keep else (0,))


def _fake_bulk(
    input: Tensor,
    lhs: Sequence[Tensor],
    rhs: Sequence[Tensor],
    collective: str,
    reduce_op: str,
    strategy: str,
    group: str,
    site: str,
) -> tuple[Tensor, list[Tensor]]:
    ranks, sizes = _group_size(group), list(input.shape)
    if collective == "all_gather":
        sizes[0] = sizes[0] * ranks
    elif collective == "reduce_scatter":
        compat.check(sizes[0] % ranks == 0, lambda: "the input cannot be scattered evenly")
        sizes[0] = sizes[0] // ranks
    return _empty(input, sizes), [_empty(a, (a.shape[0], b.shape[1])) for a, b in zip(lhs, rhs, strict=True)]


_C = extension()
for _fake in (
    _fake_all_gather_matmul,
    _fake_all_gather_scaled_matmul,
    _fake_matmul_reduce_scatter,
    _fake_scaled_matmul_reduce_scatter,
    _fake_matmul_all_reduce,
    _fake_bulk,
):
    torch.library.register_fake(f"ub_overlap::{_fake.__name__.removeprefix('_fake_')}", _fake)
_C.install(provide=Provider(), bind=session.bind, reference=c10d_fallback.run, make_error=errors.make)
settings.apply()
# Sessions hold Python objects: they must go while there is an interpreter.
atexit.register(_C.close_all)
