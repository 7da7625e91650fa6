"""Trace one layer alone: its forward and backward graph, as AOTAutograd makes them of a whole model.

Dynamo is tracing the model meanwhile, and its state belongs to its thread. So the layer is traced on a thread of its own, on
fake tensors: nothing runs, and nothing is exchanged.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ub_overlap import _aot_compat as aot
from ub_overlap import _torch_compat as compat


@dataclass(frozen=True, slots=True)
class TracedTokens:
    """An argument of a layer. `sizes`: those that it is traced with."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """The graphs of a layer, forward first; the last is the backward graph if gradients are recorded."""

    graphs: tuple[GraphModule, ...]
    parameters: tuple[int, ...]
    """Positions of the parameters among the inputs."""


def trace_layer(
    layer: nn.Module,
    function: Callable[..., Any],
    tokens: Sequence[TracedTokens],
    partition: Callable[..., tuple[GraphModule, GraphModule]],
) -> TracedLayer:
    """Return the graphs of `function(layer, *tokens)`. `partition`: cuts the joint graph in two.

    A copy of the layer is traced, so what its forward stores does not stay. Raises what tracing raises: the layer may read
    values, or state of others.
    """
    layer = _copy(layer, {})
    device = tokens[0].device.type
    gradients, amp = torch.is_grad_enabled(), autocast_dtype(device)
    found: list[TracedLayer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.set_grad_enabled(gradients), torch.autocast(device, amp, enabled=amp is not None):
                found.append(_trace(layer, function, tokens, partition))
        except BaseException as error:  # noqa: BLE001  of a thread: raised again where it is joined
            errors.append(error)

    thread = threading.Thread(target=run, name="ub_overlap_trace_layer")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def _copy(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of a module and its submodules with the same tensors. `made`: the copies so far, by id of the original."""
    if id(module) not in made:
        copied = made[id(module)] = module.__class__.__new__(module.__class__)
        copied.__dict__ = {k: copy.copy(v) if isinstance(v, dict | list | set) else v for k, v in module.__dict__.items()}
        copied._modules = {name: None if m is None else _copy(m, made) for name, m in module._modules.items()}
    return made[id(module)]


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the type of autocast, None where it is off. Threads do not inherit it."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _trace(
    layer: nn.Module,
    function: Callable[..., Any],
    tokens: Sequence[TracedTokens],
    partition: Callable[..., tuple[GraphModule, GraphModule]],
) -> TracedLayer:
    mode, graphs = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True), list[GraphModule]()
    gradients = torch.is_grad_enabled()

    def fake(t: Tensor) -> Tensor:
        with torch.no_grad():
            own = mode.from_tensor(t.detach())
        return own.requires_grad_(t.requires_grad and gradients)

    state = {name: fake(t) for name, t in (*layer.named_parameters(), *layer.named_buffers())}
    with mode:
        inputs = [torch.empty(t.sizes, dtype=t.dtype, device=t.device) for t in tokens]
        for made, t in zip(inputs, tokens, strict=True):
            made.requires_grad_(t.requires_grad and gradients)

    def call(*values: Tensor) -> Any:
        with compat.reparametrize_module(layer, dict(zip(state, values, strict=False))):
            return function(layer, *values[len(state) :])

    def note(gm: GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return compat.make_boxed_func(gm.forward)

    compiled = aot.compile_function(call, note, partition, parameters=len(state))
    with mode:
        leaves = [
            o for o in compat.tree_leaves(compiled(*state.values(), *inputs)) if isinstance(o, Tensor) and o.requires_grad
        ]
        if leaves:
            torch.autograd.backward(leaves, [torch.ones_like(o) for o in leaves])
    known = sum(1 for _ in layer.named_parameters())
    return TracedLayer(tuple(graphs), tuple(range(known)))
