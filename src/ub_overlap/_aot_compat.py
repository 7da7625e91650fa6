"""What AOTAutograd notes about a graph and its compilation, beyond names (`_torch_compat.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ub_overlap import _torch_compat


def fake_input(value: Any) -> Any:
    """Return an input of Dynamo's graph as a fake tensor of the current compilation; `value` itself outside of one."""
    context = _torch_compat.TracingContext.try_get()
    if context is None or context.fake_mode is None or _torch_compat.is_fake(value):
        return value
    symbols = context.tensor_to_context.get(value)
    source = None if symbols is None else symbols.tensor_source
    with context.fake_mode:  # DTensor caches no sharding of symbolic sizes then
        return context.fake_mode.from_tensor(value, symbolic_context=symbols, source=source, trace=False)


def dtensor_input(node: Any) -> int | None:
    """Return the index of the DTensor input of Dynamo's graph whose local tensor this placeholder is, else None.

    `node`: a placeholder of a joint graph."""
    desc = node.meta.get("desc")
    return getattr(desc.base, "idx", None) if getattr(desc, "attr", None) == "_local_tensor" else None


def graph_input(node: Any) -> int | None:
    """Return the index of the input of Dynamo's graph that this placeholder, or its DTensor, is; else None.

    `node`: a placeholder of a joint graph."""
    desc = node.meta.get("desc")
    return getattr(desc, "idx", None) if dtensor_input(node) is None else dtensor_input(node)


def saved_outputs(node: Any) -> list[int]:
    """Return the positions of tensors that are saved for backward among the outputs of a graph. `node`: its output node."""
    descs = node.meta.get("desc") or ()
    return [i for i, desc in enumerate(descs) if type(desc).__name__.startswith("SavedForBackwards")]


def gradient_of(desc: Any) -> int | None:
    """Return the index of the input of Dynamo's graph whose gradient an output is, or whose DTensor's; else None.

    `desc`: of an output of a backward graph.
    """
    while (base := getattr(desc, "base", None)) is not None:
        desc = base
    return getattr(getattr(desc, "grad_of", None), "idx", None)


def drop_donated_inputs() -> None:
    """Let no backward graph of the current compilation reuse the memory of saved tensors."""
    context = _torch_compat.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def compile_function(
    function: Callable[..., Any], compiler: Callable[..., Any], partition: Callable[..., Any], parameters: int
) -> Callable[..., Any]:
    """Return `function`, whose forward and backward graph `compiler` gets at the first call, decomposed as for Inductor.

    `partition`: cuts the joint graph in two. `parameters`: number of the first arguments that are a model's state.
    """
    return _torch_compat.aot_function(
        function,
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partition,
        num_params_buffers=parameters,
        decompositions=_torch_compat.decompositions(),
    )
