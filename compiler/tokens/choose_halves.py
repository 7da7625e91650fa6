"""Choose how a tokenwise layer is computed: whole, or in two halves of its tokens.

    split_tokens="auto"     both forms are traced alone, forward and backward, and decided like any graph; the faster is taken
    split_tokens="force"    in halves
    split_tokens="off"      whole; so too with other backends, and where predicted times do not decide

Halves cost what the cost model counts: more kernels, more and smaller exchanges, weight gradients that are added. Ranks choose
alone, from the sizes that they trace; as for every graph, a rank that chose otherwise gets PlanMismatchError.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ub_overlap import _dynamo_compat as dynamo
from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.session import host_groups, transport

from ..cost.policy import Policy
from ..graph.graph_inputs import GraphInputs
from ..options import Options, parse
from ..passes import JointPass, phase_of, prepare_sites
from ..reports.history import HISTORY
from ..select.decide import decide
from ..select.graph_time import graph_us
from .in_halves import in_halves
from .token_split import TokenSplit
from .trace_layer import TracedTokens, autocast_dtype, trace_layer

log = logging.getLogger(__name__)

MARGIN = 0.03
"""The saving required of two halves, as a share of the whole layer."""

DEPTH = 2
"""How deep objects in attributes of a layer are examined for its settings."""

_CHOSEN: dict[tuple[Any, ...], TokenSplit] = {}
"""Layers with the same structure, sizes and options are chosen once."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


@torch.compiler.assume_constant_result
def choose_dim() -> int:
    """Return the dim along which the tokens of the layer that is being traced are cut, -1 for none.

    Dynamo runs it while it traces a forward of `tokenwise`, and takes the result as a constant.
    """
    options = _options_of(dynamo.tracing_backend())
    if options is None:
        return -1
    try:
        names = dynamo.traced_locals()
        layer, name = dynamo.module_of(names["layer"]), dynamo.source_of(names["layer"])
        tokens = tuple(map(_traced, dynamo.items_of(names["tokens"])))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        log.warning("a tokenwise layer stays whole: what Dynamo traces cannot be read: %s: %s", type(error).__name__, error)
        return -1
    choice = _choose(layer, tokens, options)
    HISTORY.record_token_split(choice.of(name or type(layer).__name__))
    return choice.dim


def _traced(variable: Any) -> TracedTokens:
    t = dynamo.tensor_of(variable)
    return TracedTokens(dynamo.hints_of(t.shape), t.dtype, t.device, t.requires_grad)


def _options_of(backend: Any) -> Options | None:
    """Return the options of a backend, None if it is not ours."""
    from ..backend import ub_overlap

    backend = compat.innermost_backend(backend) if callable(backend) else None
    if inspect.unwrap(getattr(backend, "compiler_fn", backend)) is not ub_overlap:  # type: ignore[arg-type]
        return None
    given = getattr(backend, "kwargs", {})
    return parse(given.get("options"), compat.inductor_option_names())[0]


def _choose(layer: nn.Module, tokens: tuple[TracedTokens, ...], options: Options) -> TokenSplit:
    sizes, device = tokens[0].sizes, tokens[0].device.type
    for name, value in (("split_tokens", options.split_tokens), ("overlap", options.overlap)):
        if value == "off":
            return TokenSplit(sizes, -1, reason=f"{name}='off'")
    dim = next((d for d, n in enumerate(sizes[:-1]) if n > 1), -1)
    if dim < 0:
        return TokenSplit(sizes, -1, reason="it has one token")
    if options.split_tokens == "force":
        return TokenSplit(sizes, dim, reason="split_tokens='force'")
    policy = Policy.of(options)
    if not policy.may_split or not policy.is_weighed(device):
        return TokenSplit(sizes, -1, reason="predicted times do not decide with these options on this device")
    modes = torch.is_grad_enabled(), autocast_dtype(device), transport.transport_signature()
    key = (_structure(layer), tokens, modes, options.key())
    if key not in _CHOSEN:
        _CHOSEN[key] = _compare(layer, tokens, dim, options, policy)
        log.info("%s: %s", type(layer).__name__, _CHOSEN[key])
    return _CHOSEN[key]


def _compare(layer: nn.Module, tokens: tuple[TracedTokens, ...], dim: int, options: Options, policy: Policy) -> TokenSplit:
    def whole(own: nn.Module, *given: Tensor) -> Any:
        return type(layer).forward(own, *given)  # whole, as Dynamo does not trace it

    def halves(own: nn.Module, *given: Tensor) -> Any:
        return in_halves(lambda *half: whole(own, *half), given, dim)

    sizes = tokens[0].sizes
    try:
        whole_us = _layer_us(layer, whole, tokens, options, policy)
        halves_us = _layer_us(layer, halves, tokens, options, policy)
    except Exception as error:  # noqa: BLE001  the layer is the user's: whatever it raises on fake tensors, it stays whole
        first = (str(error).splitlines() or [""])[0]
        return TokenSplit(sizes, -1, reason=f"it cannot be traced alone: {type(error).__name__}: {first}"[:300])
    is_faster = halves_us < whole_us * (1 - MARGIN)
    return TokenSplit(sizes, dim if is_faster else -1, whole_us, halves_us)


def _layer_us(layer: nn.Module, function: Any, tokens: tuple[TracedTokens, ...], options: Options, policy: Policy) -> float:
    """Return the predicted microseconds of `function(layer, *tokens)` and its backward."""
    host_groups.name_host_groups()
    traced = trace_layer(layer, function, tokens, JointPass(options).partition)
    us, inputs = 0.0, GraphInputs(parameters=traced.parameters)
    for gm in traced.graphs:
        parameters = inputs.parameters_in(gm.graph)
        prepare_sites(gm.graph, options, parameters)
        decided = decide(gm.graph, options, phase_of(gm.graph), transport.unsupported_reason, parameters=parameters)
        us += graph_us(gm.graph, decided, policy, tokens[0].device.type)
    return us


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    """Return what the graphs of a layer depend on: its modules with their settings and groups, and its parameters."""
    modules = tuple((name, type(m), _settings(vars(m), 0)) for name, m in layer.named_modules())
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return modules, tuple((name, str(t.dtype), tuple(t.shape), t.requires_grad) for name, t in tensors)


def _settings(values: Mapping[str, Any], depth: int) -> tuple[Any, ...]:
    """Return attributes that are no state: lists and dicts may grow in each call."""
    return tuple(
        (name, _setting(v, depth))
        for name, v in sorted(values.items())
        if name not in _OF_MODULES and not isinstance(v, list | dict | set | torch.Tensor)
    )


def _setting(value: Any, depth: int) -> Any:
    """Return a plain value, the name of a group, or the type of an object with its own settings, as of a configuration."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if isinstance(value, tuple):
        return tuple(_setting(v, depth) for v in value)
    group = getattr(value, "group_name", None)
    if isinstance(group, str):
        return group
    slots = {n: getattr(value, n) for n in getattr(type(value), "__slots__", ()) if hasattr(value, n)}
    own = {**slots, **getattr(value, "__dict__", {})}
    return type(value), _settings(own, depth + 1) if depth < DEPTH and not isinstance(value, type) else ()
