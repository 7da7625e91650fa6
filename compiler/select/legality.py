"""candidate -> the site that its match allows, or why there is none."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from ..cost.wire import SEGMENT
from ..graph.aten import shape_of, tensor_of
from ..graph.size_sources import SizeSources
from ..graph.sizes import Size
from ..match import Candidate, Fused, Gather, Miss, Reduction, Site
from ..match.collectives import Op
from ..match.fusion_order import FusionOrder
from ..match.pack_groups import one_matmul, packed_forms
from ..match.site import Match
from ..plan.reasons import Reason
from ..plan.strategy import DispatchTable, Mode, Strategy

FINAL = (
    Reason.COLLECTIVE_UNSUPPORTED, Reason.GROUP_NOT_STATIC, Reason.TRIVIAL_GROUP, Reason.DTYPE_UNSUPPORTED,
    Reason.REDUCE_OP_UNSUPPORTED, Reason.SCALES,
)  # fmt: skip
"""Reasons that no override changes."""


def find_illegal(candidate: Candidate, forced: Strategy | DispatchTable, may_pack: bool) -> str:
    """Return why a candidate that could be overlapped does not have the strategy `forced`; "" where nothing is known.

    `may_pack`: whether the options allow packed operands.
    """
    match, miss = candidate.match, candidate.miss
    if candidate.collective.op is Op.ALL_TO_ALL and forced.mode is not Mode.SPLIT:
        return f"{forced.mode.value} is not possible for an all_to_all: it is split, or none"
    if candidate.collective.op is Op.ALL_TO_ALL and any(s.chunks for s in forced.strategies):
        return "an all_to_all has no chunks: each rank's rows are one piece"
    if forced.mode is Mode.BULK and match is not None and not candidate.independent_matmuls:
        own = ", ".join(p.node.name for p in match.matmuls)
        return f"bulk needs a matmul that is independent of the collective, and there is none; {own} can be pipelined with it"
    if forced.is_fused:
        return why_not_fused(candidate, forced)
    needs_own = forced.mode in (Mode.PIPELINED, Mode.DIRECT)
    if needs_own and miss is not None and miss.reason is Reason.NO_MATMUL and candidate.independent_matmuls:
        name, mode = candidate.independent_matmuls[0].node.name, forced.mode.value
        return f"{mode} needs a matmul of the collective's own data: {miss.detail}; bulk can hide it behind {name}"
    if forced.striped and (why := _no_stripes(match)):
        return why
    if forced.engine_copies and isinstance(match, Reduction):
        return "copies=engine copies what has landed and is kept; here nothing is gathered"
    return why_not_direct(match, may_pack) if forced.direct and match is not None else ""


def why_not_direct(match: Match, may_pack: bool) -> str:
    """Return why the product of a match cannot be stored at its owners; "" where it can.

    Addends do not matter: they are a rank's own business. `may_pack`: a sum of matmuls may become one.
    """
    if not isinstance(match, Reduction):
        return "direct stores a product at the ranks that reduce it; here shards are gathered"
    if match.shard_dim_is_last:
        return "direct stores blocks of rows, and here the last dim is scattered"
    if len(match.terms) > 1 and not (may_pack and one_matmul(packed_forms(match))):
        return f"direct stores the product of one matmul, and here {len(match.terms)} are summed"
    if match.terms[0].scales is not None:
        return "direct stores no product of float8 operands"
    if match.kept_nodes:
        return f"direct keeps no copy of the product, which {match.kept_nodes[0].name} needs"
    return ""


def why_not_fused(candidate: Candidate, forced: Strategy | DispatchTable) -> str:
    """Return why a collective cannot be one kernel; "" where it can."""
    fused, op = candidate.fused, candidate.collective.op
    if not isinstance(fused, Fused):
        return f"a fused collective is not possible: {fused.detail if fused else 'nothing is known of it'}"
    if op is not Op.ALL_REDUCE and any(s.mode is Mode.TWO_SHOT for s in forced.strategies):
        return f"two_shot is a strategy of all_reduces; here is {op.value if op else 'another collective'}"
    return ""


def _no_stripes(match: Match | None) -> str:
    """Return why a match cannot run in stripes; "" where it can, or where something else prevents pipelining."""
    if isinstance(match, Gather):
        return "stripes cut a product that is reduced; here shards are gathered"
    if match is not None and match.shard_dim_is_last:
        return "stripes cut shards, and those of the last dim cannot be cut"
    return ""


def pipelined(candidate: Candidate, order: FusionOrder) -> Match | Miss:
    """Return the match without the matmuls that would close a cycle. Nothing is fused in `order` yet."""
    match = candidate.match
    if match is None:
        return candidate.miss or Miss(Reason.NO_MATMUL, "no matmul touches its tensor")
    if isinstance(match, Reduction):
        return match
    # A consumer whose other operand needs a result of the site would close a cycle: it reads the kept tensor instead.
    results = {k.compute.node for k in match.consumers}
    match = without(match, {k.compute.node for k in match.consumers if k.operand.node in results})
    while cycle := order.conflicts(match.members):
        late = {k.compute.node for k in match.consumers if k.operand.node in cycle}
        if not late or len(late) == len(match.consumers):
            return Miss(
                Reason.DEPENDENT_OPERAND, f"{min(n.name for n in cycle)} needs the gathered tensor and feeds its matmul"
            )
        match = without(match, late)
    return match


def without(match: Gather, matmuls: set[Node]) -> Gather:
    """Return `match` without some consumers, which then read the gathered tensor."""
    if not matmuls:
        return match
    left_out = [k for k in match.consumers if k.compute.node in matmuls]
    aliases = [n for k in left_out for n in k.compute.node.all_input_nodes if n in match.aliases]
    consumers = tuple(k for k in match.consumers if k.compute.node not in matmuls)
    scales = match.scales
    if scales is not None:
        read_scales = [k.compute.scales.lhs for k in left_out if k.compute.scales]
        scales = replace(scales, kept_aliases=tuple(dict.fromkeys((*scales.kept_aliases, *read_scales))))
    kept_aliases = tuple(dict.fromkeys((*match.kept_aliases, *aliases)))
    return replace(match, consumers=consumers, kept_aliases=kept_aliases, scales=scales)


def can_send_float8(site: Site) -> bool:
    """Whether a site may send its products as float8: a sum of float8 matmuls, in rows of whole segments."""
    if not isinstance(site, Reduction) or site.terms[0].scales is None:
        return False
    return isinstance(site.cols, int) and site.cols % SEGMENT == 0


def unknown_size(site: Site, sources: SizeSources) -> Miss | None:
    """Return the miss of a site that needs a size which `sources`, the graph's inputs, do not determine."""
    needed: list[Size] = [site.blocks.outer, site.rows, site.cols] if isinstance(site, Gather | Reduction) else []
    needed += [s for p in site.matmuls for o in (p.lhs, p.rhs) for s in o.shape]
    needed += [s for n in site.members if tensor_of(n) is not None for s in shape_of(n)]
    unknown = next((s for s in dict.fromkeys(needed) if sources.find(s) is None), None)
    return None if unknown is None else Miss(Reason.DYNAMIC_SHAPE, f"size {unknown} cannot be computed from the graph's inputs")
