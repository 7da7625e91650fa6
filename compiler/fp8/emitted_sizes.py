"""Find the dynamic sizes that emitted nodes must compute from the graph's inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch.fx import Node

from ..graph.size_sources import SizeSources
from ..graph.sizes import Size


def sizes_to_emit(shape: Sequence[Size], joined: bool = False) -> Iterator[Size]:
    """Yield the dynamic sizes that a reshape to `shape` needs. It infers a single one by itself.

    `joined`: the shape is that of a piece that is cut and joined again, which needs every size.
    """
    dynamic = [size for size in shape if not isinstance(size, int)]
    if joined or len(dynamic) > 1:
        yield from dynamic


def find_unknown_size(inputs: Sequence[Node], sizes: Iterable[Size]) -> Size | None:
    """Return the first of `sizes` that cannot be computed from `inputs`, or None."""
    sources = SizeSources(inputs)
    return next((size for size in sizes if sources.find(size) is None), None)
