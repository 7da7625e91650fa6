"""Arguments of the ops for smoke.py, random, on this rank's device."""

from __future__ import annotations

import os
from typing import Any

import torch

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", RANK)))
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def randn(*sizes: int, dtype: torch.dtype = F32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*sizes, device=DEVICE) * scale).to(dtype)


def gather_case(dtype: torch.dtype, outer: int, m: int, q: int, modes: list[int], last: bool, keep: bool) -> tuple[Any, ...]:
    shard = randn(m, q, dtype=dtype) if last else randn(outer, m, q, dtype=dtype)
    rows, cols = (m, q * WORLD) if last else (outer * WORLD * m, q)
    operands = [randn(rows if mode >= 2 else cols, 96 + 8 * i, dtype=dtype, scale=0.1) for i, mode in enumerate(modes)]
    operands = [o.t().contiguous().t() if i % 2 == 0 else o for i, o in enumerate(operands)]  # a Linear's weight is transposed
    return shard, operands, modes, 1 if last else outer, last, keep


def scatter_case(dtype: torch.dtype, outer: int, m: int, q: int, last: bool, **more: Any) -> tuple[Any, ...]:
    p, cols = (m, q * WORLD) if last else (outer * WORLD * m, q)
    depths = more.get("depths", [128])
    lhs = [randn(p, k, dtype=dtype) for k in depths]
    rhs = [randn(cols, k, dtype=dtype, scale=0.1).t() for k in depths]
    addend = randn(cols, dtype=dtype) if more.get("bias") else None
    out_dtype, keep = more.get("out_dtype", dtype), more.get("keep", False)
    return lhs, rhs, addend, 1 if last else outer, last, more.get("by", "sum"), out_dtype, keep


def reduce_case(dtype: torch.dtype, p: int, q: int, k: int, by: str, keep: bool) -> tuple[Any, ...]:
    return [randn(p, k, dtype=dtype)], [randn(k, q, dtype=dtype, scale=0.1)], None, by, dtype, keep


def bulk_case(dtype: torch.dtype, collective: str, rows: int, q: int, by: str = "sum") -> tuple[Any, ...]:
    return randn(rows, q, dtype=dtype), [randn(128, 64, dtype=dtype)], [randn(64, 96, dtype=dtype)], collective, by
