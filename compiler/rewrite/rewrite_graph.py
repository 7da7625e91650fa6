"""graph + plan -> graph. Every decision comes from the plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.emitter import Emitter
from ..graph.erase import erase_unread
from ..graph.sizes import as_size
from ..match.all_to_all import split_nodes
from ..match.collectives import Collective, Op
from ..match.site import Fused, Gather, Reduction, Split
from ..plan.chosen_site import ChosenSite
from ..windows.layout import GraphLayout, apply_layout
from .bulk_site import rewrite_bulk
from .fused_site import rewrite_fused
from .gather_site import rewrite_gather
from .ordered_rows import read_in_order
from .packed_operands import PackedOperands
from .part_strides import Outputs, update_strides
from .reduction_site import rewrite_reduction
from .split_site import rewrite_split


def rewrite(
    graph: Graph, chosen: Sequence[ChosenSite], outputs: Outputs, verify: bool = False, layout: GraphLayout | None = None
) -> None:
    """Replace each chosen site by its op, in place.

    Only nodes that a site replaced are removed: a wider dead-code predicate would also delete updates of buffers.
    `layout`: the order of the graph, where split collectives have places in it.
    `outputs`: the parts of packed results that the graph may return.
    `verify`: they stay, and other nodes read torch.ops.ub_overlap.compare(op's, graph's, name), which returns the op's.
    """
    if not chosen:
        return
    replaced: dict[Node, Node] = {}
    packed = PackedOperands()
    for site in chosen:
        _rewrite_site(graph, site, replaced, packed, verify)
    if layout is None:
        compat.stable_topological_sort(graph)
    else:
        apply_layout(graph, layout, {str(site.id): site.site.members for site in chosen})
    read_in_order(graph)
    update_strides(graph, packed.parts, outputs)
    graph.lint()


def _rewrite_site(
    graph: Graph, chosen: ChosenSite, replaced_before: dict[Node, Node], packed: PackedOperands, verify: bool
) -> None:
    site, name = chosen.site, str(chosen.id)
    members = site.members
    inside = set(members)
    e = Emitter(graph, site.collective.node, replaced_before, name, _size_sources(graph, site.collective))
    with graph.inserting_before(_insertion_point(members, inside)):
        replaced = _emit(e, chosen, name, packed)
        if verify:
            replaced = {old: _compare(e, old, new, inside, name) for old, new in replaced.items()}
        sizes: dict[Node, int | Node] = {}  # the size of a tensor outlives it
        for user in {u: None for m in members for u in m.users if u.target is torch.ops.aten.sym_size.int}:
            sizes[user] = e.size(as_size(user.meta["val"]))
    for old, new in replaced.items():
        # Only outside users move: nodes of the site read the old value until they are removed.
        old.replace_all_uses_with(new, delete_user_cb=lambda u, new=new: u not in inside and u is not new)
    for old, size in sizes.items():
        _replace_size(old, size)
    replaced_before.update(replaced)
    still_read = erase_unread(graph, sizes if verify else (*members, *replaced, *sizes))
    assert not still_read, f"{name}: {still_read} are still used after the rewrite"


def _size_sources(graph: Graph, c: Collective) -> list[Node]:
    """Return the nodes that sizes may be computed from: the graph's inputs, and the numbers of rows of an all_to_all."""
    return [*graph.find_nodes(op="placeholder"), *(split_nodes(c) if c.op is Op.ALL_TO_ALL else ())]


def _insertion_point(members: list[Node], inside: set[Node]) -> Node:
    """The node before which the op goes: after the site's last input and its first node.

    A write may stand before the site's first node. The sort at the end of `rewrite` moves users behind the op.
    """
    inputs = {i for m in members for i in m.all_input_nodes if i not in inside}
    last = max(*inputs, min(members))  # nodes of one graph compare by their place in it
    while last.next.op == "placeholder":
        last = last.next
    return last.next


def _emit(e: Emitter, chosen: ChosenSite, name: str, packed: PackedOperands) -> dict[Node, Node]:
    site, strategy = chosen.site, chosen.strategy
    if isinstance(site, Gather):
        return rewrite_gather(e, site, strategy, name, packed)
    if isinstance(site, Reduction):
        return rewrite_reduction(e, site, strategy, name, packed, chosen.wire_dtype)
    if isinstance(site, Fused):
        return rewrite_fused(e, site, strategy, name)
    if isinstance(site, Split):
        return rewrite_split(e, site, strategy, name, packed)
    return rewrite_bulk(e, site, strategy, name, packed)


def _compare(e: Emitter, old: Node, new: Node, inside: set[Node], name: str) -> Node:
    """Return the value that users of `old` outside of the site read under `verify`: `new`, compared with `old`."""
    if all(u in inside or u.target is torch.ops.aten.sym_size.int for u in old.users):
        return new
    val = new.meta["val"]  # the copy of a part of a packed result is contiguous
    return e.call(torch.ops.ub_overlap.compare.default, new, old, name, value_is=val if val.is_contiguous() else None)


def _replace_size(old: Node, new: int | Node) -> None:
    if isinstance(new, Node):
        old.replace_all_uses_with(new)
        return
    for user in list(old.users):
        user.args = torch.fx.node.map_arg(user.args, lambda n: new if n is old else n)  # type: ignore[assignment]
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda n: new if n is old else n)  # type: ignore[assignment]
