"""What the ranks hold of a graph's inputs, as DTensor tells: what is decided on a local size must be the same on all of them.

    weight [1006, 512], Shard(0) over 3 ranks: 336, 336 and 334 rows        no graph of one rank says what the others have

Sizes are ranks' own where a dim does not divide evenly. Of inputs that are no DTensors nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

LocalSizes = tuple[tuple[int, ...], ...]
"""Of each dim of a tensor: the sizes that ranks have, ascending; one where all have the same, none where nobody knows."""
UnevenInputs = tuple[tuple[int, LocalSizes], ...]
"""(place among the inputs of Dynamo's graph, sizes) of those that ranks hold different sizes of; part of cache keys."""


def find_uneven_inputs(inputs: Iterable[Any]) -> UnevenInputs:
    """Of the inputs that a backend gets. The same on all ranks of a mesh."""
    found = [(n, local_sizes(x.shape, x.device_mesh.shape, x.placements)) for n, x in enumerate(inputs) if _is_dtensor(x)]
    return tuple((n, sizes) for n, sizes in found if any(len(dim) > 1 for dim in sizes))


def local_sizes(shape: Sequence[Any], mesh: Sequence[int], placements: Sequence[Any]) -> LocalSizes:
    """The sizes of the local tensors of a DTensor of `shape` over a mesh of the sizes `mesh`."""
    dims: list[set[int]] = [{n} if isinstance(n, int) else set() for n in shape]
    for ranks, placement in zip(mesh, placements, strict=True):
        if placement.is_replicate() or placement.is_partial():
            continue
        if not placement.is_shard():  # strided shards cut in another order
            return tuple(() for _ in dims)
        dims[placement.dim] = {size for n in dims[placement.dim] for size in _chunks(n, ranks)}
    return tuple(tuple(sorted(dim)) for dim in dims)


def _chunks(n: int, ranks: int) -> set[int]:
    """Sizes of the shards of n: as torch.chunk cuts, with empty ones where it makes fewer."""
    full = -(-n // ranks)
    return {max(0, min(full, n - rank * full)) for rank in range(ranks)}


def sizes_by_placeholder(graph: Graph, shards: UnevenInputs) -> dict[Node, LocalSizes]:
    """By placeholder of a joint graph that takes the local tensors."""
    sizes: Mapping[int, LocalSizes] = dict(shards)
    places = {node: compat.dtensor_input(node) for node in graph.find_nodes(op="placeholder")} if shards else {}
    return {node: sizes[place] for node, place in places.items() if place in sizes}


def _is_dtensor(x: Any) -> bool:
    return isinstance(x, Tensor) and hasattr(x, "device_mesh") and hasattr(x, "placements")  # without importing it for others
