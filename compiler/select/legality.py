"""candidate -> the site that can be made of its match, or why there is none."""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch.fx import Node

from ..cost.wire import SEGMENT
from ..graph.aten import shape_of, tensor_of
from ..graph.sizes import Size
from ..match import Bulk, Candidate, Gather, Miss, Reduction, Site
from ..match.fusion_order import FusionOrder
from ..plan.reasons import Reason


def no_stripes(match: Gather | Reduction | None) -> str:
    """Why this cannot run in stripes, "" where it can (or where something else keeps it from being pipelined)."""
    if isinstance(match, Gather):
        return "stripes cut a product that is reduced; here shards are gathered"
    return (
        "stripes cut shards, and those of the last dim cannot be cut" if match is not None and match.shard_dim_is_last else ""
    )


def pipelined(candidate: Candidate, order: FusionOrder) -> Site | Miss:
    """The match, less the matmuls that would close a circle. Nothing is fused in `order` yet."""
    free = candidate.match
    if free is None:
        return candidate.miss or Miss(Reason.NO_MATMUL, "no matmul touches its tensor")
    if isinstance(free, Reduction):
        return free
    # Consumers whose other operand needs a result of the site would close a circle: they read the kept tensor instead.
    made = {k.compute.node for k in free.consumers}
    free = without(free, {k.compute.node for k in free.consumers if k.operand.node in made})
    while circle := order.conflicts(free.members):
        late = {k.compute.node for k in free.consumers if k.operand.node in circle}
        if not late or len(late) == len(free.consumers):
            return Miss(
                Reason.DEPENDENT_OPERAND, f"{min(n.name for n in circle)} needs the gathered tensor and feeds its matmul"
            )
        free = without(free, late)
    return free


def without(match: Gather, products: set[Node]) -> Gather:
    """`match` less some consumers, which become other users of the gathered tensor."""
    if not products:
        return match
    gone = [k for k in match.consumers if k.compute.node in products]
    aliases = [n for k in gone for n in k.compute.node.all_input_nodes if n in match.aliases]
    kept = tuple(k for k in match.consumers if k.compute.node not in products)
    scales = match.scales
    if scales is not None:
        late = [k.compute.scales.lhs for k in gone if k.compute.scales]
        scales = replace(scales, kept_aliases=tuple(dict.fromkeys((*scales.kept_aliases, *late))))
    return replace(match, consumers=kept, kept_aliases=tuple(dict.fromkeys((*match.kept_aliases, *aliases))), scales=scales)


def can_send_float8(site: Site) -> bool:
    """Whether a reduction's products may be sent as float8: of float8 operands, in rows of whole segments."""
    if not isinstance(site, Reduction) or site.terms[0].scales is None:
        return False
    return isinstance(site.cols, int) and site.cols % SEGMENT == 0


def unknown_size(site: Site, known: frozenset[sympy.Symbol]) -> Miss | None:
    """A size the op would need that cannot be computed from the graph's inputs."""
    needed: list[Size] = [] if isinstance(site, Bulk) else [site.blocks.outer, site.rows, site.cols]
    needed += [s for p in site.matmuls for o in (p.lhs, p.rhs) for s in o.shape]
    needed += [s for n in site.members if tensor_of(n) is not None for s in shape_of(n)]
    for s in dict.fromkeys(needed):
        if isinstance(s, int):
            continue
        atoms = [a for a in sympy.preorder_traversal(s) if not isinstance(a, sympy.Mul | sympy.Add)]
        if not all(a in known or (a.is_Integer and a.is_positive) for a in atoms):
            return Miss(Reason.DYNAMIC_SHAPE, f"size {s} cannot be computed from the graph's inputs")
    return None
