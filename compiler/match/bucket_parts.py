"""The parts of a bucket, each of which its collective sends as one tensor.

    a large collective                 a part of its own, which is sent from its place
    small collectives of one type      one part, into which their data is copied (cat)

The sizes alone decide, so that ranks and saved plans agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph.aten import dtype_of, shape_of
from ..graph.sizes import numel
from .collectives import Collective, Op

COPIED_BYTES = 2 << 20
"""A collective of fewer bytes, over all ranks, is copied: a launch takes longer than its bytes."""


def is_copied(c: Collective) -> bool:
    """Return whether a bucket holds a copy of what `c` sends."""
    elements = numel(shape_of(c.input))
    whole = elements * c.narrow_dtype.itemsize * (c.ranks if c.op is Op.ALL_GATHER else 1)
    return isinstance(whole, int) and whole < COPIED_BYTES


def types_of(c: Collective) -> tuple[torch.dtype, torch.dtype]:
    """Return the types of what `c` sends and of its result. Collectives of one part have the same."""
    return c.narrow_dtype, dtype_of(c.node)


def bucket_parts(collectives: Sequence[Collective]) -> list[list[int]]:
    """Return the numbers of the collectives in each part, in the order of the first of each."""
    parts: list[list[int]] = []
    copies: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, c in enumerate(collectives):
        if is_copied(c) and types_of(c) in copies:
            copies[types_of(c)].append(i)
            continue
        parts.append([i])
        if is_copied(c):
            copies[types_of(c)] = parts[-1]
    return parts
