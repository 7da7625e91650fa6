"""Where a tensor repeats its elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True, slots=True)
class Repeat:
    """Index (o, r, j) of [outer, count, inner] along `dim`, where all r < count belong together.

    Of a repeated tensor: they hold the same. Of a gradient: only their sum is read. Keys that are repeated for several heads
    have inner 1 along the heads. The same keys as one dim have the elements of a head as inner.
    """

    dim: int
    count: int
    inner: int = 1

    def shape_without(self, shape: Sequence[int]) -> list[int]:
        """Return `shape` with one element for all r."""
        return [size // self.count if d == self.dim else size for d, size in enumerate(shape)]

    def shape_apart(self, shape: Sequence[int]) -> list[int]:
        """Return `shape` with `dim` as the three dims outer, count and inner."""
        outer = shape[self.dim] // (self.count * self.inner)
        return [*shape[: self.dim], outer, self.count, self.inner, *shape[self.dim + 1 :]]

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether `dim` holds all r of each element."""
        return shape[self.dim] % (self.count * self.inner) == 0

    def permuted(self, order: Sequence[int]) -> Repeat:
        """Return the repeat of the tensor whose dim d is dim order[d] of this one."""
        return replace(self, dim=list(order).index(self.dim))

    def viewed(self, shape: Sequence[int], as_shape: Sequence[int]) -> Repeat | None:
        """Return the repeat of a tensor of `shape` that is viewed as `as_shape`, None if no dim holds it."""
        inner = self.inner * prod(shape[self.dim + 1 :])
        for dim in reversed(range(len(as_shape))):
            behind = prod(as_shape[dim + 1 :])
            if behind and inner % behind == 0:
                found = Repeat(dim, self.count, inner // behind)
                if as_shape[dim] and found.fits(as_shape):
                    return found
        return None

    def cuts(self, dim: int, *rows: int) -> bool:
        """Return whether cuts of `dim` at `rows` leave all r of each element together."""
        return dim != self.dim or all(row % (self.count * self.inner) == 0 for row in rows)

    def scaled(self, dim: int, rows: int) -> int:
        """Return a position along `dim`, or a number of rows, with one element for all r."""
        return rows // self.count if dim == self.dim else rows
