"""graph + plan -> graph. Obeys the plan; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.emitter import Emitter
from ..graph.erase import erase_unread
from ..graph.sizes import as_size
from ..match.site import Gather, Reduction
from ..plan.chosen_site import ChosenSite
from .bulk_site import rewrite_bulk
from .gather_site import rewrite_gather
from .reduction_site import rewrite_reduction


def rewrite(graph: Graph, chosen: Sequence[ChosenSite], verify: bool = False) -> None:
    """Replace each chosen site by its op, in place.

    Only nodes that a site replaced are removed: a wider dead-code predicate would also delete updates of buffers. `verify`:
    they stay, and what others read goes through torch.ops.ub_overlap.compare(ours, theirs, name), which hands ours on.
    """
    if not chosen:
        return
    replaced: dict[Node, Node] = {}
    for site in chosen:
        _rewrite_site(graph, site, replaced, verify)
    compat.stable_topological_sort(graph)
    graph.lint()


def _rewrite_site(graph: Graph, chosen: ChosenSite, so_far: dict[Node, Node], verify: bool) -> None:
    site, strategy, name = chosen.site, chosen.strategy, str(chosen.id)
    members = site.members
    inside = set(members)
    inputs = {i for m in members for i in m.all_input_nodes if i not in inside}
    # Behind the input that comes last now, and never before the site's first node: a write may stand before that. The sort at
    # the end puts users behind us.
    behind = max(*inputs, min(members))  # nodes of one graph compare by their place in it
    while behind.next.op == "placeholder":
        behind = behind.next
    e = Emitter(graph, site.collective.node, so_far, name)
    with graph.inserting_before(behind.next):
        if isinstance(site, Gather):
            replaced = rewrite_gather(e, site, strategy, name)
        elif isinstance(site, Reduction):
            replaced = rewrite_reduction(e, site, strategy, name, chosen.wire_dtype)
        else:
            replaced = rewrite_bulk(e, site, strategy, name)
        if verify:
            replaced = {old: _compared(e, old, new, inside, name) for old, new in replaced.items()}
        sizes_kept: dict[Node, int | Node] = {}
        for user in {u: None for m in members for u in m.users if u.target is torch.ops.aten.sym_size.int}:
            sizes_kept[user] = e.size(as_size(user.meta["val"]))  # the tensor goes, its size stays
    for old, new in replaced.items():
        # Nodes of the site keep reading the old value until they are removed: only outside users move.
        old.replace_all_uses_with(new, delete_user_cb=lambda u, new=new: u not in inside and u is not new)
    for old, known in sizes_kept.items():
        _replace_size(old, known)
    so_far.update(replaced)
    still_read = erase_unread(graph, sizes_kept if verify else (*members, *replaced, *sizes_kept))
    assert not still_read, f"{name}: {still_read} are still used after the rewrite"


def _compared(e: Emitter, old: Node, new: Node, inside: set[Node], name: str) -> Node:
    """What users of `old` outside of the site read when it is verified: `new`, once it has been compared with `old`."""
    if all(u in inside or u.target is torch.ops.aten.sym_size.int for u in old.users):
        return new
    return e.call(torch.ops.ub_overlap.compare.default, new, old, name, value_is=new.meta["val"])


def _replace_size(old: Node, new: int | Node) -> None:
    if isinstance(new, Node):
        old.replace_all_uses_with(new)
        return
    for user in list(old.users):
        user.args = torch.fx.node.map_arg(user.args, lambda n: new if n is old else n)  # type: ignore[assignment]
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda n: new if n is old else n)  # type: ignore[assignment]
