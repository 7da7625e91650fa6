"""Shapes of tensor-parallel projections of two Llama sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MODELS = {"8b": (4096, 6144, 14336), "70b": (8192, 10240, 28672)}
"""Hidden size, columns of q, k and v together, columns of w1 (and of w3)."""


@dataclass(frozen=True)
class Shape:
    """out[m, n] = a[m, k] @ b[n, k]^T of one rank of `ranks`; `gathers`: whether `a` is gathered, else `out` is scattered."""

    model: str
    what: str
    gathers: bool
    ranks: int
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.what} tp{self.ranks} {self.m}x{self.n}x{self.k}"

    @property
    def rows(self) -> int:
        """Of one shard."""
        return self.m // self.ranks

    @property
    def shard_bytes(self) -> int:
        """What one rank sends to another: rows of `a`, or of `out`."""
        return self.rows * (self.k if self.gathers else self.n) * 2


def shapes(models: list[str], ranks: list[int], rows: list[int]) -> Iterator[Shape]:
    """Yield the shapes: w1 and w3 are one matmul."""
    for model in models:
        hidden, qkv, wide = MODELS[model]
        for r in ranks:
            for m in rows:
                yield Shape(model, "qkv", True, r, m, qkv // r, hidden)
                yield Shape(model, "w13", True, r, m, 2 * wide // r, hidden)
                yield Shape(model, "wo", False, r, m, hidden, hidden // r)
                yield Shape(model, "w2", False, r, m, hidden, wide // r)
