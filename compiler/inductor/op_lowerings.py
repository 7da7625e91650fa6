"""How Inductor lowers our ops, where its own way does not fit them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import ops


@functools.cache
def register_lowerings() -> None:
    """Register the lowerings, once in a process."""
    _never_reuse(torch.ops.ub_overlap.fp8_cached_weight.default)
    _never_reuse(torch.ops.ub_overlap.fp8_cached_weight_transposed.default)
    _never_reuse(torch.ops.ub_overlap.packed_weight.default)
    _hold_input(torch.ops.ub_overlap.start_collective.default, torch.ops.ub_overlap.finish_collective.default)
    for definition in ops.DEFINITIONS.values():
        if definition.flat_overload is not None:
            use_flat_results(definition.overload, definition.flat_overload)


def _never_reuse(op: Any) -> None:
    """Forbid Inductor to reuse the output buffers of `op`: their memory is not Inductor's."""
    lower, virtualized = compat.__getattr__("fallback_handler")(op), compat.__getattr__("inductor_virtualized")

    def kept(*args: Any, **kwargs: Any) -> Any:
        outputs = lower(*args, **kwargs)
        for output in compat.__getattr__("tree_leaves")(outputs):
            virtualized.graph.never_reuse_buffers.add(output.get_name())
        return outputs

    compat.__getattr__("register_lowering")(op, type_promotion_kind=None)(kept)


def _hold_input(start: Any, finish: Any) -> None:
    """Give `finish` the very buffer that `start` reads, so that nothing reuses it in between.

    Inductor may compute or copy an argument for each op apart. The start's copy would be free after the start, while its
    transfer still reads it.
    """
    begin, end = compat.__getattr__("fallback_handler")(start), compat.__getattr__("fallback_handler")(finish)
    virtualized, kernel = compat.__getattr__("inductor_virtualized"), compat.__getattr__("extern_kernel_ir")

    def lower_start(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        tensor.realize()
        held = kernel.require_contiguous(tensor)
        held.realize()
        token = begin(held, *args, **kwargs)
        _held_inputs(virtualized.graph)[token.get_name()] = held
        return token

    def lower_finish(token: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return end(token, _held_inputs(virtualized.graph).get(token.get_name(), tensor), *args, **kwargs)

    compat.__getattr__("register_lowering")(start, type_promotion_kind=None)(lower_start)
    compat.__getattr__("register_lowering")(finish, type_promotion_kind=None)(lower_finish)


def _held_inputs(graph: Any) -> dict[str, Any]:
    """Return what `graph`, Inductor's, has started: by the name of the token, the input."""
    held: dict[str, Any] = graph.__dict__.setdefault("ub_overlap_held_inputs", {})
    return held


def use_flat_results(op: Any, flat: Any) -> None:
    """Let Inductor's C++ wrapper call `flat` for `op`, whose last result is a list. It has no code for such results.

    `flat`: an op of the same arguments that returns all results in one list.
    """
    fallback = compat.__getattr__("fallback_handler")
    nested, listed = fallback(op), fallback(flat)
    singles = len(op._schema.returns) - 1
    dtype_lists = [i for i, a in enumerate(op._schema.arguments) if repr(a.real_type) == "List[ScalarType]"]

    def lower(*args: Any, **kwargs: Any) -> Any:
        if not compat.__getattr__("inductor_virtualized").graph.cpp_wrapper:
            return nested(*args, **kwargs)
        # Traced calls hold integers, for which torch 2.11 has no code.
        own = [compat.dtypes(arg) if i in dtype_lists else arg for i, arg in enumerate(args)]
        results = listed(*own, **kwargs)
        return (*results[:singles], results[singles:])

    compat.__getattr__("register_lowering")(op, type_promotion_kind=None)(lower)
