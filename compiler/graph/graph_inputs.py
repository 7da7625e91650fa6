"""Facts about the inputs of Dynamo's graph that the graphs derived from it do not hold.

Decisions rest on them, so they are part of cache keys. torch's own cache keys leave them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _aot_compat
from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.packed_mark import MARK

from .aten import is_mutable
from .dtensor_sizes import UnevenInputs, find_uneven_inputs
from .sizes import symbolic_sizes
from .traced_graph import attribute_of

Neighbors = Mapping[Node, tuple[int, int]]
"""Matrices next to each other in memory: the number of their block, and the offset in elements. They are placeholders of packed
parameters, and cached float8 casts of siblings (fp8/state/cached_weights.py)."""
NO_NEIGHBORS: Neighbors = MappingProxyType({})


def _find_neighbors(inputs: Sequence[Any], parameters: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return (position, number of the block, offset in elements) of packed parameters that follow each other in memory."""
    packed = {i: getattr(inputs[i], "_local_tensor", inputs[i]) for i in parameters if hasattr(inputs[i], MARK)}
    found: list[tuple[int, int, int]] = []
    blocks, begin, end = 0, 0, None
    for i, weight in sorted(packed.items(), key=lambda item: item[1].data_ptr()):
        if not weight.is_contiguous():
            continue
        if weight.data_ptr() != end:
            blocks, begin = blocks + 1, weight.data_ptr()
        found.append((i, blocks, (weight.data_ptr() - begin) // weight.element_size()))
        end = weight.data_ptr() + weight.numel() * weight.element_size()
    # Blocks are numbered by their first position: addresses differ between runs and ranks.
    numbers = {block: number for number, block in enumerate(dict.fromkeys(block for _, block, _ in sorted(found)))}
    return tuple((i, numbers[block], offset) for i, block, offset in sorted(found))


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """Facts about the inputs of one of Dynamo's graphs."""

    hints: tuple[Any, ...] = ()
    """The values of symbolic sizes that decisions use, and their ranges."""
    shards: UnevenInputs = ()
    """The local sizes of inputs that differ between ranks."""
    parameters: tuple[int, ...] = ()
    """The positions of the model's parameters, which are the same tensors in every call."""
    neighbors: tuple[tuple[int, int, int], ...] = ()
    """(position, number of the block of memory, offset in elements) of packed parameters (ub_overlap.pack)."""
    is_known: bool = True
    """False for passes that see graphs only: they have none of these facts."""
    by_position: bool = False
    """The graph takes these inputs themselves, in this order: it was not derived from one of Dynamo. Then the sizes of other
    ranks are not known."""

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> GraphInputs:
        """Return the facts about the inputs that a backend gets."""
        hints = tuple((compat.hint_of(x), compat.range_of(x)) for x in symbolic_sizes(inputs))
        parameters = tuple(i for i, x in enumerate(inputs) if isinstance(x, torch.nn.Parameter))
        return cls(hints, find_uneven_inputs(inputs), parameters, _find_neighbors(inputs, parameters))

    @classmethod
    def of_traced(cls, graph: Graph, inputs: Sequence[Any], parameters: tuple[int, ...] | None) -> GraphInputs:
        """Return the facts about the inputs of a graph that the user has traced.

        `parameters`: their positions. None: those that are nn.Parameters; without any, all that may be some.
        """
        hints = tuple((compat.hint_of(x), compat.range_of(x)) for x in symbolic_sizes(inputs))
        if parameters is None:
            parameters = tuple(i for i, x in enumerate(inputs) if isinstance(x, torch.nn.Parameter))
            if not parameters and not _parameter_attributes(graph):
                parameters = tuple(i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.is_floating_point())
        return cls(hints, (), parameters, _find_neighbors(inputs, parameters), is_known=False, by_position=True)

    @property
    def knows_parameters(self) -> bool:
        """Whether `parameters` holds all of them."""
        return self.is_known or self.by_position

    def neighbors_in(self, graph: Graph) -> Neighbors:
        """Return the placeholders of a forward or backward graph that take packed parameters.

        Those that the graph writes to are left out, as a write would not wait for those who read the block as one matrix.
        """
        places: dict[int | None, tuple[int, int]] = {position: (block, offset) for position, block, offset in self.neighbors}
        found = {n: places.get(position) for n, position in self._positions(graph)} if places else {}
        return {n: place for n, place in found.items() if place is not None and not any(map(is_mutable, n.users))}

    def parameters_in(self, graph: Graph) -> set[Node]:
        """Return the placeholders of a graph that take parameters, or their local tensors."""
        positions = set(self.parameters)
        found = {n for n, position in self._positions(graph) if position in positions}
        return found | _parameter_attributes(graph) if self.by_position else found

    def _positions(self, graph: Graph) -> list[tuple[Node, int | None]]:
        """Return each placeholder with its position among the inputs."""
        inputs = enumerate(graph.find_nodes(op="placeholder"))
        return [(n, i if self.by_position else _aot_compat.graph_input(n)) for i, n in inputs]


def _parameter_attributes(graph: Graph) -> set[Node]:
    """Return the nodes that read parameters of the graph's module."""
    return {n for n in graph.find_nodes(op="get_attr") if isinstance(attribute_of(n), torch.nn.Parameter)}
