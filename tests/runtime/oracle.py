"""Expected op results in fp64, computed from all ranks' inputs, and the error tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Transposes = tuple[bool, bool]
"""(transpose_gathered, transpose_out) of one consumer of a gather."""
ALL_TRANSPOSES: list[Transposes] = [(False, False), (False, True), (True, False), (True, True)]


def data(*sizes: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers that depend on the seed only, so any rank can compute another rank's data."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(dtype)


def gathered(shards: Sequence[Tensor], outer: int, last: bool) -> Tensor:
    """Return the gathered tensor, G of runtime/ops/all_gather_matmul.py."""
    cols = shards[0].shape[-1]
    rows = math.prod(shards[0].shape[:-1])
    if last:
        return torch.cat([s.reshape(rows, cols) for s in shards], 1)
    block = rows // outer if outer else 0
    return torch.cat([s.reshape(outer, block, cols) for s in shards], 1).reshape(len(shards) * rows, cols)


def product(gathered: Tensor, operand: Tensor, transpose_gathered: bool, transpose_out: bool) -> Tensor:
    out = (gathered.T if transpose_gathered else gathered) @ operand
    return out.T if transpose_out else out


def scattered(partials: Sequence[Tensor], outer: int, last: bool, rank: int) -> Tensor:
    """Return the shard of the sum that `rank` owns."""
    total, ranks = sum(partials), len(partials)
    rows, cols = partials[0].shape
    if last:
        return total.reshape(rows, ranks, cols // ranks)[:, rank]
    block = rows // (outer * ranks) if outer else 0
    return total.reshape(outer, ranks, block, cols)[:, rank].reshape(outer * block, cols)


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """Return the error bound of a sum of `terms` products of standard normal numbers, rounded to `dtype` a few times."""
    return 6 * torch.finfo(dtype).eps * max(1, terms) ** 0.5 + 1e-6 * max(1, terms) ** 0.5


def far(name: str, got: Tensor, want: Tensor, terms: int, dtype: torch.dtype | None = None) -> list[str]:
    """Return a list of errors in the sizes, layout and values of `got`. `dtype`: the least precise type involved."""
    if tuple(got.shape) != tuple(want.shape):
        return [f"{name}: got sizes {tuple(got.shape)}, expected {tuple(want.shape)}"]
    if not got.is_contiguous():
        return [f"{name}: strides {got.stride()}"]
    if not got.numel():
        return []
    scale = max(1.0, float(want.abs().max()))
    error = float((got.double() - want).abs().max()) / scale
    limit = tolerance(dtype or got.dtype, terms)
    return [f"{name}: off by {error:.3g} of the largest value, limit {limit:.3g}"] if not error <= limit else []
