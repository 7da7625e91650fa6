"""Compile a backward graph in two parts by Inductor (rewrite/weight_gradients.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from ub_overlap import _aot_compat
from ub_overlap import _torch_compat as compat

from ..rewrite.weight_gradients import separate_weight_gradients
from .order_options import restored_order


def compile_parts(
    inner: Callable[..., Any], parameters: Sequence[int], gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Any:
    """Compile a graph of AOTAutograd by Inductor: as `inner`, Inductor's own function, but a backward in two parts."""
    parts = separate_weight_gradients(gm, parameters) if kwargs.get("is_backward") else None
    if parts is None:
        return inner(gm, example_inputs, **kwargs)
    _aot_compat.drop_donated_inputs()  # the second part reads saved tensors after the first has run
    inputs = list(example_inputs)
    seconds = [inputs[i] for i in parts.kept] + [n.meta["val"] for n in parts.values]
    _keep_strides(parts.first.graph, range(parts.results, parts.results + len(parts.values)))
    with restored_order():  # else the second part would be compiled with what the first has changed
        first = inner(parts.first, inputs, **kwargs)
    _keep_strides(parts.second.graph, ())
    second = inner(parts.second, seconds, **{**kwargs, "static_input_idxs": ()})
    return parts.joined(first, second)


def _keep_strides(graph: Graph, positions: Sequence[int]) -> None:
    """Let Inductor return the outputs at `positions` with the strides that they were traced with."""
    graph.output_node().meta["user_visible_output_idxs"] = list(positions)


def inner_compiler(parameters: Sequence[int]) -> Callable[..., Any]:
    """Return a function to compile graphs with, for Inductor's compile_fx."""
    return functools.partial(compile_parts, compat.compile_fx_inner, tuple(parameters))
