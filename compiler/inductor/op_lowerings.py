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
