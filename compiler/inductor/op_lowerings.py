"""How Inductor lowers our ops, where its own way does not fit them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    _never_reuse(torch.ops.ub_overlap.fp8_packed_casts.default)
    own = torch.ops.ub_overlap
    _lower_split_pair(own.start_collective.default, own.finish_collective.default)
    _lower_split_pair(own.start_all_to_all.default, own.finish_all_to_all.default)
    _lower_split_pair(own.start_coalesced.default, own.finish_coalesced.default)
    _lower_release(own.release_collective.default)
    _lower_release(own.release_coalesced.default)
    for definition in ops.DEFINITIONS.values():
        if definition.flat_overload is not None:
            use_flat_results(definition.overload, definition.flat_overload)
        fix_listed_strides(definition.overload)


def _never_reuse(op: Any) -> None:
    """Forbid Inductor to reuse the output buffers of `op`: their memory is not Inductor's."""
    lower, virtualized = compat.__getattr__("fallback_handler")(op), compat.__getattr__("inductor_virtualized")

    def kept(*args: Any, **kwargs: Any) -> Any:
        outputs = lower(*args, **kwargs)
        virtualized.graph.never_reuse_buffers.update(_names_of(outputs))
        return outputs

    compat.__getattr__("register_lowering")(op, type_promotion_kind=None)(kept)


def _names_of(buffers: Any) -> list[str]:
    """Return the names of one buffer, or of several."""
    return [buffer.get_name() for buffer in compat.__getattr__("tree_leaves")(buffers)]


def _lower_split_pair(start: Any, finish: Any) -> None:
    """Give `finish` the very buffers that `start` reads, so that nothing reuses them in between, and keep the order of a slot.

    Inductor may compute or copy an argument for each op apart. The start's copy would be free after the start, while its
    transfer still reads it. Landing memory, which a zero-copy gather returns, is not Inductor's to reuse. A start follows the
    op by which the last collective has left its slot, although no data says so.
    """
    handler, virtualized = compat.__getattr__("fallback_handler"), compat.__getattr__("inductor_virtualized")
    begin, end = handler(start), handler(finish)
    places = {argument.name: place - 1 for place, argument in enumerate(start._schema.arguments)}  # behind the input

    def slot_of(args: tuple[Any, ...]) -> tuple[int, str]:
        return args[places["split_slot"]], args[places["group"]]

    def own(args: tuple[Any, ...]) -> list[Any]:
        """Return the arguments with dtypes: traced calls hold integers, for which the C++ wrapper of torch 2.11 has no code."""
        return [compat.dtypes(arg) if place == places.get("out_dtypes") else arg for place, arg in enumerate(args)]

    def lower_start(sent: Any, *args: Any, **kwargs: Any) -> Any:
        held = list(map(_hold, sent)) if isinstance(sent, list | tuple) else _hold(sent)
        graph = virtualized.graph
        first = len(graph.operations)
        token = begin(held, *own(args), **kwargs)
        _keep_unread(graph.operations[first:])
        state = _split_state(graph)
        state.inputs[token.get_name()] = held
        if (left := state.left.get(slot_of(args))) is not None:
            for operation in graph.operations[first:]:
                graph.additional_buffer_deps[operation.get_operation_name()].add(left)
        return token

    def lower_finish(token: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
        graph = virtualized.graph
        first = len(graph.operations)
        result = end(token, _split_state(graph).inputs.get(token.get_name(), sent), *own(args), **kwargs)
        _keep_unread(graph.operations[first:])
        if "zero_copy" in places and args[places["zero_copy"]]:
            graph.never_reuse_buffers.update(_names_of(result))
        else:
            call = next(operation for operation in graph.operations[first:] if hasattr(operation, "op_overload"))
            _split_state(graph).left[slot_of(args)] = call.get_name()
        return result

    for op, lower in ((start, lower_start), (finish, lower_finish)):
        compat.__getattr__("register_lowering")(op, type_promotion_kind=None)(lower)


def _hold(tensor: Any) -> Any:
    """Return the contiguous buffer with the values of `tensor`."""
    tensor.realize()
    held = compat.__getattr__("extern_kernel_ir").require_contiguous(tensor)
    held.realize()
    return held


def _keep_unread(operations: Sequence[Any]) -> None:
    """Forbid Inductor to remove the calls of ops among `operations` whose results nothing reads: peers wait for them.

    Nothing reads the rows of experts on a rank without tokens: Inductor computes no tensor without elements.
    """
    for operation in operations:
        if hasattr(operation, "op_overload"):
            operation.has_side_effects = lambda: True


def _lower_release(release: Any) -> None:
    """Let the release follow all readers, and the next start of the slot follow the release.

    Inductor's own lowering of an op that writes its input issues the op first, and then what readers in front of it compute.
    """
    leave, virtualized = compat.__getattr__("fallback_handler")(release), compat.__getattr__("inductor_virtualized")

    def lower(gathered: Any, slot: int, strategy: str, group: str, site: str) -> None:
        graph = virtualized.graph
        for name in _names_of(gathered):
            graph.mark_buffer_mutated(name)
        first = len(graph.operations)
        leave(gathered, slot, strategy, group, site)
        _split_state(graph).left[slot, group] = graph.operations[first].get_name()

    compat.__getattr__("register_lowering")(release, type_promotion_kind=None)(lower)


@dataclass(slots=True)
class _SplitState:
    """The split collectives of one graph of Inductor. `inputs`: by the name of the token, the buffers that were started.
    `left`: by slot and group, the buffer of the op by which the last collective has left the slot."""

    inputs: dict[str, Any] = field(default_factory=dict)
    left: dict[tuple[int, str], str] = field(default_factory=dict)


def _split_state(graph: Any) -> _SplitState:
    state: _SplitState = graph.__dict__.setdefault("ub_overlap_split_state", _SplitState())
    return state


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


def fix_listed_strides(op: Any) -> None:
    """Let Inductor keep the order of strides that tensors in list arguments of `op` were traced with.

    torch 2.11 keeps it for single tensors only, whatever the op's tag says. A transposed copy that an op reads from a list
    could become a view: float8 matmuls refuse that.
    """
    if compat.keeps_listed_strides() or not any("List[Tensor]" in repr(a.real_type) for a in op._schema.arguments):
        return
    lower = compat.__getattr__("lowerings").get(op) or compat.__getattr__("fallback_handler")(op)
    virtualized, order_of = compat.__getattr__("inductor_virtualized"), compat.__getattr__("get_stride_order")

    def fixed(argument: Any, traced: Any) -> Any:
        if not isinstance(argument, list | tuple) or not isinstance(traced, list | tuple):
            return argument
        return [_in_order(a, t, order_of) if isinstance(t, torch.fx.Node) else a for a, t in zip(argument, traced, strict=True)]

    def lower_fixed(*args: Any, **kwargs: Any) -> Any:
        node = virtualized.graph.current_node
        own = [fixed(a, t) for a, t in zip(args, node.args, strict=True)]
        return lower(*own, **{name: fixed(a, node.kwargs[name]) for name, a in kwargs.items()})

    compat.__getattr__("register_lowering")(op, type_promotion_kind=None)(lower_fixed)


def _in_order(argument: Any, traced: torch.fx.Node, order_of: Any) -> Any:
    value = traced.meta["val"]
    if not isinstance(value, torch.Tensor):
        return argument
    return compat.__getattr__("extern_kernel_ir").require_stride_order(argument, order_of(value.stride()))
