"""The local sizes of a graph's DTensor inputs on all ranks. A decision that rests on a local size must be the same on all.

    weight [1006, 512], Shard(0) over 3 ranks: 336, 336 and 334 rows        the graph of one rank does not show the others'

Local sizes differ where a dim does not divide evenly. For inputs that are not DTensors they are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from ub_overlap import _aot_compat

LocalSizes = tuple[tuple[int, ...], ...]
"""For each dim of a tensor: the sizes on the ranks, ascending. One if all are the same, none if unknown."""
UnevenInputs = tuple[tuple[int, LocalSizes], ...]
"""(position among the inputs of Dynamo's graph, sizes) of inputs with different sizes on the ranks. Part of cache keys."""


def find_uneven_inputs(inputs: Iterable[Any]) -> UnevenInputs:
    """Return the uneven ones among a backend's inputs. The same on all ranks of a mesh."""
    dtensors = [(n, local_sizes(x.shape, x.device_mesh.shape, x.placements)) for n, x in enumerate(inputs) if _is_dtensor(x)]
    return tuple((n, sizes) for n, sizes in dtensors if any(len(dim) > 1 for dim in sizes))


def local_sizes(shape: Sequence[Any], mesh: Sequence[int], placements: Sequence[Any]) -> LocalSizes:
    """Return the sizes of the local tensors of a DTensor of `shape` over a mesh of the sizes `mesh`."""
    dims: list[set[int]] = [{n} if isinstance(n, int) else set() for n in shape]
    for ranks, placement in zip(mesh, placements, strict=True):
        if placement.is_replicate() or placement.is_partial():
            continue
        if not placement.is_shard():  # strided shards cut in another order
            return tuple(() for _ in dims)
        dims[placement.dim] = {size for n in dims[placement.dim] for size in _chunks(n, ranks)}
    return tuple(tuple(sorted(dim)) for dim in dims)


def _chunks(n: int, ranks: int) -> set[int]:
    """The sizes of the shards of a dim of size n: as torch.chunk cuts, with empty ones if it cuts fewer."""
    full = -(-n // ranks)
    return {max(0, min(full, n - rank * full)) for rank in range(ranks)}


def sizes_by_placeholder(graph: Graph, shards: UnevenInputs) -> dict[Node, LocalSizes]:
    """Return the sizes of `shards` by the placeholders of a joint graph that take the local tensors."""
    sizes: Mapping[int, LocalSizes] = dict(shards)
    positions = {node: _aot_compat.dtensor_input(node) for node in graph.find_nodes(op="placeholder")} if shards else {}
    return {node: sizes[position] for node, position in positions.items() if position in sizes}


def _is_dtensor(x: Any) -> bool:
    return isinstance(x, Tensor) and hasattr(x, "device_mesh") and hasattr(x, "placements")  # without an import of DTensor
