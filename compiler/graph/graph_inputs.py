"""Facts about the inputs of Dynamo's graph that the graphs derived from it do not hold.

Decisions rest on them, so they are part of cache keys. torch's own cache keys leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from .dtensor_sizes import UnevenInputs, find_uneven_inputs
from .sizes import hint_of, symbolic_sizes


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """Facts about the inputs of one of Dynamo's graphs."""

    hints: tuple[Any, ...] = ()
    """The values that symbolic sizes were traced with, and their ranges."""
    shards: UnevenInputs = ()
    """The local sizes of inputs that differ between ranks."""
    parameters: tuple[int, ...] = ()
    """The positions of the model's parameters, which are the same tensors in every call."""
    is_known: bool = True
    """False for passes that see graphs only: they have none of these facts."""

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> GraphInputs:
        """Return the facts about the inputs that a backend gets."""
        hints = tuple((hint_of(x), compat.range_of(x)) for x in symbolic_sizes(inputs))
        parameters = tuple(i for i, x in enumerate(inputs) if isinstance(x, torch.nn.Parameter))
        return cls(hints, find_uneven_inputs(inputs), parameters)

    def parameters_in(self, graph: Graph) -> set[Node]:
        """Return the placeholders of a joint graph that take parameters, or their local tensors."""
        positions = set(self.parameters)
        return {n for n in graph.find_nodes(op="placeholder") if compat.graph_input(n) in positions}
