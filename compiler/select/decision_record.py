"""The selected alternative of a candidate as a `Decision`: everything needed to explain it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..cost.site_sizes import Hints, shape_of_site
from ..cost.traffic import bytes_sent, bytes_sent_in, flops, sent_dtype
from ..graph.aten import dtype_of
from ..graph.matmul import is_matmul
from ..graph.source_location import module_path, stable_names
from ..joint.joint_decision import joint_decision
from ..match import Bulk, Candidate, Fused, Gather, Reduction, Site, Split
from ..match.collectives import Op
from ..overrides.requested_strategy import Override
from ..plan.decision import Decision, SplitWindow
from ..plan.reasons import Kind
from ..plan.strategy import FUSED, NONE, Mode, Strategy
from ..reports.describe_site import describe_site, group_names, reported_sizes
from .assignment import Assignment
from .dispatch_table import rows_at
from .legality import FINAL, why_not_direct

_MATCHED = {
    Op.ALL_GATHER: Kind.ALL_GATHER_MATMUL,
    Op.REDUCE_SCATTER: Kind.MATMUL_REDUCE_SCATTER,
    Op.ALL_REDUCE: Kind.MATMUL_ALL_REDUCE,
}
_PLAIN = {
    Op.ALL_GATHER: Kind.ALL_GATHER,
    Op.REDUCE_SCATTER: Kind.REDUCE_SCATTER,
    Op.ALL_REDUCE: Kind.ALL_REDUCE,
    Op.ALL_TO_ALL: Kind.ALL_TO_ALL,
    None: Kind.OTHER,
}


def kinds_of(candidate: Candidate) -> tuple[str, ...]:
    """Return the kinds that a rule may name: the collective, and the site that it forms with its matmuls."""
    op = candidate.collective.op
    matched = (_MATCHED[op].value,) if op is not None and candidate.match is not None else ()
    return (_PLAIN[op].value, *matched)


@dataclass(frozen=True, slots=True)
class GraphContext:
    """What all decisions of one graph share. `hints`: the values of its symbolic sizes that decisions use."""

    phase: str
    hints: Hints
    groups: dict[str, str]
    """By c10d name, as describe_site.group_names numbers them."""
    stable_names: dict[Node, str]
    """Names of the graph's matmuls that are the same on all ranks."""
    owners: dict[Node, str]
    """Ids of the sites whose matches contain a matmul."""
    calling_line: str
    """The user's line that called the compiled module, for sites without a line of the user's in the graph."""
    may_pack: bool
    """Whether the options allow packed operands."""

    @classmethod
    def of(
        cls, graph: Graph, phase: str, hints: Hints, candidates: Mapping[str, Candidate], calling_line: str, may_pack: bool
    ) -> GraphContext:
        """`candidates`: by site id, in graph order."""
        owners: dict[Node, str] = {}
        for name, candidate in candidates.items():
            for p in candidate.match.matmuls if candidate.match else ():
                owners.setdefault(p.node, name)
        names = stable_names(node for node in graph.nodes if is_matmul(node))
        return cls(phase, hints, group_names(list(candidates.values())), names, owners, calling_line, may_pack)


def make_decision(
    id: str,
    candidate: Candidate,
    override: Override | None,
    assignment: Assignment,
    context: GraphContext,
    window: SplitWindow | None = None,
) -> Decision:
    """Return the decision for the site `id`. `window`: of a split collective."""
    alternative, site, choice = assignment.alternative, assignment.site, assignment.choice
    shown = site or candidate.match
    op = candidate.collective.op
    is_matched = candidate.match is not None and not isinstance(site, Bulk | Split | Fused)
    matmuls = shown.matmuls if shown else ()
    operations = [flops(p) for p in matmuls]
    independent = _describe_independent(assignment, context)
    wire_dtype = alternative.wire_dtype if alternative else ""
    is_forward = context.phase == "forward"
    joint = joint_decision(candidate.collective.node)
    saved = joint.saved_activation if is_forward else None
    explanation = _explain(candidate, override, assignment, independent)
    facts = describe_site(candidate, shown, context.groups)
    facts["source"] = facts["source"] or context.calling_line
    return Decision(
        id=id,
        phase=context.phase,
        strategy=alternative.strategy if alternative else NONE,
        reason=assignment.miss.reason if assignment.miss else None,
        detail="; ".join(
            filter(None, (explanation, *map(str, filter(None, (window, assignment.estimate, saved, joint.change_note)))))
        ),
        predicted=tuple((text, round(p.us, 2)) for text, p in choice.predictions.items()) if choice else (),
        work=reported_sizes(candidate, shown, context.hints, wire_dtype),
        rows=rows_at(shown, context.hints) if shown else None,
        kind=_MATCHED[op] if is_matched and op else _PLAIN[op],
        options=_legal_modes(candidate, context.may_pack),
        matmuls=tuple(p.node.name for p in matmuls),
        takes=tuple(context.stable_names[p.node] for p in matmuls) if site else (),
        paired=independent,
        kept=saved,
        pairing=assignment.estimate,
        window=window,
        wire_dtype=wire_dtype,
        sent_dtype=_sent_dtype(site),
        rounds=_rounds(site),
        saved_bytes=_saved_bytes(candidate, site, wire_dtype),
        reordered=joint.reordered,
        scale=site.scale if isinstance(site, Reduction) else 1.0,
        packs=site.packs if isinstance(site, Gather | Reduction) else (),
        pack_bytes=_pack_bytes(site, context.hints) if isinstance(site, Gather | Reduction) and site.packs else 0,
        bytes=bytes_sent(shown, wire_dtype) if shown else None,
        flops=sum(f for f in operations if f is not None) if operations and None not in operations else None,
        **facts,
    )


def _sent_dtype(site: Site | None) -> str:
    """Return the type that a site sends where it is not that of the collective's input."""
    if site is None or sent_dtype(site) == dtype_of(site.collective.input):
        return ""
    return str(sent_dtype(site)).removeprefix("torch.")


def _rounds(site: Site | None) -> bool:
    """Return whether a site rounds the input of its collective to the type that it sends."""
    widening = site.collective.widening if site else None
    return widening is not None and widening.rounds


def _saved_bytes(candidate: Candidate, site: Site | None, wire_dtype: str) -> int | None:
    """Return the bytes that a rank sends less than in the traced graph. None where dynamic."""
    earlier = joint_decision(candidate.collective.node).saved_bytes
    narrower = _narrower_by(site, wire_dtype) if site is not None else 0
    return None if earlier is None or narrower is None else earlier + narrower


def _narrower_by(site: Site, wire_dtype: str) -> int | None:
    """Return the bytes by which a narrower type than the traced one reduces what a rank sends. None where dynamic."""
    traced = bytes_sent_in(site.collective, dtype_of(site.collective.input).itemsize, {})
    sent = bytes_sent(site, wire_dtype)
    return None if traced is None or sent is None else traced - sent


def _pack_bytes(site: Gather | Reduction, hints: Hints) -> int | None:
    """Return the bytes of this rank's packed operands that are copies."""
    shape = shape_of_site(site, hints, exact=True)
    return None if shape is None else sum(shape.copied_bytes)


def _legal_modes(candidate: Candidate, may_pack: bool) -> tuple[str, ...]:
    pipelined = (Mode.PIPELINED.value,) if candidate.match is not None else ()
    match = candidate.match
    direct = (Mode.DIRECT.value,) if match is not None and not why_not_direct(match, may_pack) else ()
    if candidate.miss is not None and candidate.miss.reason in FINAL:
        return pipelined + direct
    bulk = (Mode.BULK.value,) if candidate.independent_matmuls else ()
    fused = FUSED if candidate.collective.op is Op.ALL_REDUCE else FUSED[:1]
    return (
        *pipelined, *direct, *bulk, Mode.SPLIT.value,
        *(mode.value for mode in fused if isinstance(candidate.fused, Fused)),
    )  # fmt: skip


def merge_scales(decisions: list[Decision], candidates: list[Candidate]) -> None:
    """Mark gathers of scales as merged where the gather of their rows became a site."""
    index_of = {d.id.rpartition(".")[2]: i for i, d in enumerate(decisions)}
    for number, candidate in enumerate(candidates):
        if candidate.carrier is None:
            continue
        rows, scales = decisions[index_of[str(candidate.carrier)]], index_of[str(number)]
        if rows.strategy.mode is Mode.PIPELINED:
            detail = f"goes along with {rows.id}"
            decisions[scales] = replace(decisions[scales], strategy=Strategy(Mode.MERGED), reason=None, detail=detail)


_MERGED_TEXTS: dict[Op | None, str] = {
    Op.ALL_GATHER: "gathers the same tensor as",
    Op.ALL_TO_ALL: "backward reads the result of",
}


def merged_away(candidate: Candidate, into: Decision) -> list[Decision]:
    """Return one decision for each collective that the joint pass merged into this one."""
    merged = joint_decision(candidate.collective.node).merged_count - 1
    op = candidate.collective.op
    how = _MERGED_TEXTS.get(op, "summed into")
    return [
        Decision(
            id=f"{into.id}.merged{i}",
            phase=into.phase,
            kind=_PLAIN[op],
            strategy=Strategy(Mode.MERGED),
            detail=f"{how} {into.id}",
            group=into.group,
            ranks=into.ranks,
            dtype=into.dtype,
            module=into.module,
            source=into.source,
        )
        for i in range(merged)
    ]


def _describe_independent(assignment: Assignment, context: GraphContext) -> tuple[str, ...]:
    """Return the independent matmuls of a site: "mm_3 of forward.2 (layers.0.w1)" where another site matches them.

    Of a split all_to_all: those between its start and finish.
    """
    if assignment.site is None:
        return ()
    texts = []
    site = assignment.site
    for node in site.concurrent if isinstance(site, Split) else (p.node for p in site.independent):
        module = module_path(node)
        owner = f" of {context.owners[node]}" if node in context.owners else ""
        texts.append(node.name + owner + (f" ({module})" if module else ""))
    return tuple(texts)


def _explain(candidate: Candidate, override: Override | None, assignment: Assignment, independent: tuple[str, ...]) -> str:
    """Return the reason or the choice in a sentence, and its requester."""
    if assignment.miss:
        text = assignment.miss.detail
    else:
        limit = assignment.alternatives.independent_limit
        overlapped = f"no independent matmuls: {limit}" if limit else ""
        if independent:
            overlapped = f"concurrent with {', '.join(independent)}"
        choice = assignment.choice.reason if assignment.choice else ""
        packed = assignment.alternative.pack_reason if assignment.alternative else ""
        narrow = _describe_types(assignment)
        fused = _describe_fused(assignment.site)
        text = "; ".join(filter(None, (_why_bulk(candidate, assignment), overlapped, narrow, fused, choice, packed)))
    if override is None or override.strategy is None or override.by in text:
        return text
    return "; ".join(filter(None, [text, f"{override.strategy} forced by {override.by}"]))


def _describe_types(assignment: Assignment) -> str:
    """Return the types of a reduction that sends a narrower one than it returns; "" for other sites."""
    site = assignment.site
    if site is None or isinstance(site, Gather) or (assignment.alternative and assignment.alternative.wire_dtype):
        return ""
    sent, reduced = sent_dtype(site), dtype_of(site.collective.node)
    if sent.itemsize >= reduced.itemsize:
        return ""
    names = [str(dtype).removeprefix("torch.") for dtype in (sent, reduced)]
    sends = f"rounds to {names[0]}, sends that" if _rounds(site) else f"sends {names[0]}"
    saved = _narrower_by(site, "")
    return f"{sends} and sums in {names[1]}" + (f" ({saved} bytes fewer)" if saved else "")


def _describe_fused(site: Site | None) -> str:
    """Return what is one kernel with a fused collective; "" for other sites."""
    if not isinstance(site, Fused):
        return ""
    names, branch = {"rms": "RMSNorm", "layer": "LayerNorm"}, site.branch
    parts = ["the linear bias"] if branch and branch.linear_bias else []
    parts += [f"{names[branch.norm.kind]} of the branch"] if branch and branch.norm else []
    parts += [f"the factor {branch.factor:g}"] if branch and branch.factor != 1 else []
    parts += ["the addend"] if branch and branch.addend else []
    parts += [*(["the residual"] if site.residual else []), *([names[site.norm.kind]] if site.norm else [])]
    parts += ["the cast to float8"] if site.cast else []
    *first, last = parts or [""]
    text = f"one kernel with {', '.join(first)}{' and ' if first else ''}{last}" if parts else ""
    return f"{text}; the cast to float8 stays behind it: {site.why_no_cast}" if site.why_no_cast else text


def _why_bulk(candidate: Candidate, assignment: Assignment) -> str:
    """Return why a bulk or split site is not pipelined."""
    miss = candidate.miss
    if miss is None or candidate.collective.op is Op.ALL_TO_ALL or not isinstance(assignment.site, Bulk | Split):
        return ""
    return f"not pipelined: {miss.reason.value}: {miss.detail}"
