"""What is known of the inputs of Dynamo's graph that the graphs made of it do not say. Decisions rest on it, so it is part of
cache keys; torch's own leave it out."""

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
    """`hints`: the values that symbolic sizes were traced with, and their ranges. `shards`: what the ranks hold of inputs.
    `parameters`: the places of those that are the model's, and come with every call."""

    hints: tuple[Any, ...] = ()
    shards: UnevenInputs = ()
    parameters: tuple[int, ...] = ()
    is_known: bool = True
    """False: a pass that sees graphs only has none of these facts."""

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> GraphInputs:
        """Of the inputs that a backend gets."""
        hints = tuple((hint_of(x), compat.range_of(x)) for x in symbolic_sizes(inputs))
        parameters = tuple(i for i, x in enumerate(inputs) if isinstance(x, torch.nn.Parameter))
        return cls(hints, find_uneven_inputs(inputs), parameters)

    def parameters_in(self, graph: Graph) -> set[Node]:
        """The placeholders of a joint graph that take them, or their local tensors."""
        places = set(self.parameters)
        return {n for n in graph.find_nodes(op="placeholder") if compat.graph_input(n) in places}
