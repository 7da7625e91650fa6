"""Functional copies that change nothing: `aten.copy(to, source)` where the result may be `source` itself.

Compiled autograd copies each new gradient, and the averaged one again. In `to` only the sizes, type and strides matter, but it
counts as a reader, so the local gradient seems to be needed next to the average::

    mm -> new_empty_strided -> copy -> div -> all_reduce -> wait        mm -> div -> all_reduce -> wait -> output
                                 \\______________________________|
                                     copy -> output

`dist.all_gather` copies each shard into a tensor of its list, which programs join again::

    all_gather -> wait -> slice, slice -> copy, copy -> cat         all_gather -> wait -> slice, slice -> cat
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from .aten import alias_base, aten, is_mutable, shape_of, tensor_of
from .erase import erase_unread
from .sizes import as_sizes, is_same_shape

_EMPTY = {
    aten.new_empty_strided.default, aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default,
    aten.empty_strided.default,
}  # fmt: skip


def drop_copies(graph: Graph) -> int:
    """Replace each copy by its source where both have one layout, and where nothing can tell the two memories apart.

    Return the number of copies. Nothing else may read the source's memory, since it might write it, or return it as a second
    result. Or all that reads the copy joins it with others, which copies it again.
    """
    dropped = 0
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        target, source = node.args[0], node.args[1]
        if not (isinstance(source, Node) and isinstance(target, Node) and _has_layout_of(node, source)):
            continue
        templates = [user for user in source.users if user.target is aten.new_empty_strided.default]
        if not _is_read_once(source, {node, *templates}) and not (target.target in _EMPTY and _is_only_joined(node)):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        erase_unread(graph, [n for n in (*templates, target) if n.target in _EMPTY])
        dropped += 1
    return dropped


def _is_only_joined(node: Node) -> bool:
    """Return whether all readers join `node` with other tensors, with no write to any memory before the last of them."""
    if not node.users or any(user.target is not aten.cat.default for user in node.users):
        return False
    last, step = max(node.users), node
    while step is not last:
        step = step.next
        if is_mutable(step):
            return False
    return True


def _has_layout_of(node: Node, source: Node) -> bool:
    """Return whether the elements of both have the same places, type and device."""
    a, b = tensor_of(node), tensor_of(source)
    if (
        a is None
        or b is None
        or a.dtype != b.dtype
        or a.device != b.device
        or not is_same_shape(shape_of(node), shape_of(source))
    ):
        return False
    return is_same_shape(as_sizes(a.stride()), as_sizes(b.stride()))


def _is_read_once(source: Node, readers: set[Node]) -> bool:
    """Return whether `readers` alone read the memory of `source`, and an op of the graph allocates it."""
    while source.op == "call_function" and set(source.users) <= readers:
        base = alias_base(source)
        if base is None:
            return isinstance(source.target, compat.OpOverload)
        if source.target is operator.getitem and alias_base(base) is None:
            return True  # one of several results of an op, each with memory of its own
        readers, source = {source}, base
    return False
