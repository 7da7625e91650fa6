"""Gathers whose result may stay in landing memory: zero-copy gathers.

    finish_collective -> gathered (landing memory) -> views -> readers ... release_collective

The memory belongs to the graph only until the release. So every reader must be in the graph, at a place that is known when the
release is placed. Other gathers are copied: one that the graph returns or saves, through whatever view; one that is written;
one that another collective sends; one that is read by an op whose result may share its memory.

Release mutates `gathered` for Inductor. Its lowering stores what earlier elementwise readers compute. A reader that Inductor
would compute within a later kernel is thus better off with a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import alias_base, is_mutable, readers
from ..match.collectives import Op, is_collective
from ..match.fusion_order import FusionOrder
from ..match.window import Window
from ..select.peak_memory import is_fused


def find_readers(window: Window, widening: Collection[Node] = ()) -> list[Node] | None:
    """Return all nodes that read the result of a gather or are views of it. None if it has to be copied.

    `widening`: the casts in front of reductions, whose sites send what these read.
    """
    c = window.collective
    if c.op is not Op.ALL_GATHER or c.hosts > 1 or c.wait is None:
        return None
    found: dict[Node, None] = {}
    todo = [c.wait]
    while todo:
        node = todo.pop()
        for user in readers(node):
            if user in found:
                continue
            if not _is_safe(user) or user in widening:
                return None
            found[user] = None
            if alias_base(user) is not None:
                todo.append(user)
            elif is_fused(user) and any(map(is_fused, user.users)):
                return None
    return list(found) or None


def _is_safe(user: Node) -> bool:
    """Return whether a reader, and all that its result shares memory with, is known from its schema."""
    if user.op != "call_function" or is_mutable(user) or is_collective(user):
        return False
    if alias_base(user) is not None:
        return alias_base(user) in user.all_input_nodes[:1]
    if not isinstance(user.target, compat.OpOverload):
        return False  # higher-order ops, and functions of Python
    return not any(result.alias_info for result in user.target._schema.returns)


def release_position(window: Window, found: Sequence[Node], order: FusionOrder, moving: Mapping[Node, object]) -> int | None:
    """Return the position in `order` before which the result may be released, at its finish or later.

    None where a reader moves with the finish of another window, or where the slot would be taken during a call that bounds the
    window. `found`: of `find_readers`.
    """
    own = {node for w in window.each for node in (w.collective.wait, *w.trail)}
    others = [n for n in found if n not in own]
    if any(n in moving for n in others):
        return None
    # A copy of the trail that stands behind the finish stays there.
    late = [*others, *(n for n in found if n in own and alias_base(n) is None)]
    release = max((order.span(n)[1] + 1 for n in late), default=0)
    begin = min(order.position[w.collective.node] for w in window.each)
    return None if any(begin < order.position[call] < release for call in window.calls) else release
