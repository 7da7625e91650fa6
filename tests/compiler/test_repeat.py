"""Where a view repeats its elements."""

from __future__ import annotations

import pytest
import torch

from ub_overlap.compiler.joint.repeats.repeat import Repeat


@pytest.mark.parametrize(
    ("shape", "repeat", "as_shape", "found"),
    [
        ((1, 6, 4, 5), Repeat(1, 3), (120,), Repeat(0, 3, 20)),
        ((120,), Repeat(0, 3, 20), (1, 6, 4, 5), Repeat(1, 3)),
        ((2, 60), Repeat(1, 3, 20), (120,), Repeat(0, 3, 20)),
        ((1, 2, 3, 4, 5), Repeat(2, 3), (6, 20), Repeat(0, 3)),
        ((120,), Repeat(0, 3, 20), (40, 3), None),
        ((120,), Repeat(0, 3, 20), (12, 10), Repeat(0, 3, 2)),
        ((6, 4), Repeat(1, 4), (24,), Repeat(0, 4)),
        ((6, 4), Repeat(0, 6), (3, 8), None),
        ((6, 1, 4), Repeat(0, 3), (1, 6, 4), Repeat(1, 3)),
    ],
)
def test_views(shape: tuple[int, ...], repeat: Repeat, as_shape: tuple[int, ...], found: Repeat | None) -> None:
    assert repeat.viewed(shape, as_shape) == found
    if found is not None:
        assert found.viewed(as_shape, shape) == repeat, "views of views"


def test_views_of_all_shapes() -> None:
    """The repeat of a view is where equal elements are."""
    shapes = [(24,), (2, 12), (4, 6), (2, 3, 4), (3, 2, 2, 2), (1, 24), (6, 1, 4)]
    for shape in shapes:
        for as_shape in shapes:
            for dim, size in enumerate(shape):
                for count in (2, 3, 4, 6):
                    if size % count == 0:
                        value = torch.arange(24 // count).reshape(Repeat(dim, count).shape_without(shape))
                        value = value.repeat_interleave(count, dim)
                        found = Repeat(dim, count).viewed(shape, as_shape)
                        if found is not None:
                            viewed = value.reshape(as_shape).reshape(found.shape_apart(as_shape))
                            first = viewed.narrow(found.dim + 1, 0, 1)
                            assert torch.equal(viewed, first.expand_as(viewed)), (shape, as_shape, dim, count)
