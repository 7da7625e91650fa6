"""What came out for a candidate, as a Decision: everything needed to explain it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..cost.choice import StrategyChoice
from ..cost.site_sizes import Hints
from ..cost.traffic import bytes_sent, flops
from ..graph.matmul import is_matmul
from ..graph.source_location import module_path, stable_names
from ..joint.joint_decision import joint_decision
from ..match import Bulk, Candidate, Miss, Site
from ..match.collectives import Op
from ..overrides.requested_strategy import Override
from ..plan.decision import BulkEstimate, Decision
from ..plan.reasons import Kind
from ..plan.strategy import NONE, Mode, Strategy
from ..reports.describe_site import groups_of, row, work_of
from .alternatives import Alternative, Alternatives
from .dispatch_table import rows_at

_MATCHED = {
    Op.ALL_GATHER: Kind.ALL_GATHER_MATMUL,
    Op.REDUCE_SCATTER: Kind.MATMUL_REDUCE_SCATTER,
    Op.ALL_REDUCE: Kind.MATMUL_ALL_REDUCE,
}
_PLAIN = {
    Op.ALL_GATHER: Kind.ALL_GATHER,
    Op.REDUCE_SCATTER: Kind.REDUCE_SCATTER,
    Op.ALL_REDUCE: Kind.ALL_REDUCE,
    None: Kind.OTHER,
}


def kinds_of(candidate: Candidate) -> tuple[str, ...]:
    """What a rule may call a candidate: its collective, and the site that it makes with its matmuls."""
    op = candidate.collective.op
    matched = (_MATCHED[op].value,) if op is not None and candidate.match is not None else ()
    return (_PLAIN[op].value, *matched)


@dataclass(frozen=True, slots=True)
class GraphContext:
    """What the decisions of one graph have in common. `hints`: the values that its symbolic sizes were traced with."""

    phase: str
    hints: Hints
    groups: dict[str, str]
    """By c10d name, as describe.groups_of numbers them."""
    places: dict[Node, str]
    """What all ranks call the graph's matmuls."""
    owners: dict[Node, str]
    """Ids of the sites that matmuls could belong to."""

    @classmethod
    def of(cls, graph: Graph, phase: str, hints: Hints, candidates: Mapping[str, Candidate]) -> GraphContext:
        """`candidates`: by site id, in graph order."""
        owners: dict[Node, str] = {}
        for name, candidate in candidates.items():
            for p in candidate.match.matmuls if candidate.match else ():
                owners.setdefault(p.node, name)
        places = stable_names(node for node in graph.nodes if is_matmul(node))
        return cls(phase, hints, groups_of(list(candidates.values())), places, owners)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What came out for a candidate: the way that was taken, or the miss that says why none was."""

    id: str
    """Of the site."""
    candidate: Candidate
    found: Alternative | Miss
    offer: Alternatives
    """What was open to it."""
    wish: Override | None
    """What the user forces."""
    weighed: BulkEstimate | None
    """What pairing it would have cost and saved, or did."""

    @property
    def way(self) -> Alternative | None:
        return None if isinstance(self.found, Miss) else self.found

    @property
    def miss(self) -> Miss | None:
        return self.found if isinstance(self.found, Miss) else None

    @property
    def site(self) -> Site | None:
        return self.way.site if self.way else None

    @property
    def choice(self) -> StrategyChoice | None:
        """What was predicted."""
        return self.way.choice if self.way else self.offer.choice


def decision(o: Assignment, setting: GraphContext) -> Decision:
    candidate, site, choice = o.candidate, o.site, o.choice
    shown = site or candidate.match
    op = candidate.collective.op
    matched = candidate.match is not None and not isinstance(site, Bulk)
    products = shown.matmuls if shown else ()
    work = [flops(p) for p in products]
    beside = _beside(o, setting)
    wire_dtype = o.way.wire_dtype if o.way else ""
    kept = joint_decision(candidate.collective.node).saved_activation if setting.phase == "forward" else None
    legal = ((Mode.PIPELINED.value,) if candidate.match is not None else ()) + (
        (Mode.BULK.value,) if candidate.independent_matmuls else ()
    )
    return Decision(
        id=o.id,
        phase=setting.phase,
        strategy=o.way.strategy if o.way else NONE,
        reason=o.miss.reason if o.miss else None,
        detail="; ".join(filter(None, (_detail(o, beside), str(o.weighed or ""), str(kept or "")))),
        predicted=tuple((text, round(p.us, 2)) for text, p in choice.predictions.items()) if choice else (),
        work=work_of(candidate, shown, setting.hints, wire_dtype),
        rows=rows_at(shown, setting.hints) if shown else None,
        kind=_MATCHED[op] if matched and op else _PLAIN[op],
        options=legal,
        matmuls=tuple(p.node.name for p in products),
        takes=tuple(setting.places[p.node] for p in products) if site else (),
        paired=beside,
        kept=kept,
        pairing=o.weighed,
        wire_dtype=wire_dtype,
        bytes=bytes_sent(shown, wire_dtype) if shown else None,
        flops=sum(f for f in work if f is not None) if work and None not in work else None,
        **row(candidate, shown, setting.groups),
    )


def carry_scales(decisions: list[Decision], candidates: list[Candidate]) -> None:
    """Gathers of scales whose rows became a site are part of it."""
    at = {d.id.rpartition(".")[2]: i for i, d in enumerate(decisions)}
    for number, candidate in enumerate(candidates):
        if candidate.carrier is None:
            continue
        rows, mine = decisions[at[str(candidate.carrier)]], at[str(number)]
        if rows.strategy.mode is Mode.PIPELINED:
            along = f"goes along with {rows.id}"
            decisions[mine] = replace(decisions[mine], strategy=Strategy(Mode.MERGED), reason=None, detail=along)


def merged_away(candidate: Candidate, into: Decision) -> list[Decision]:
    """One decision for each all_reduce that the joint pass summed into this one."""
    gone = joint_decision(candidate.collective.node).merged_count - 1
    return [
        Decision(
            id=f"{into.id}.merged{i}",
            phase=into.phase,
            kind=Kind.ALL_REDUCE,
            strategy=Strategy(Mode.MERGED),
            detail=f"summed into {into.id}",
            group=into.group,
            ranks=into.ranks,
            dtype=into.dtype,
            module=into.module,
            source=into.source,
        )
        for i in range(gone)
    ]


def _beside(o: Assignment, setting: GraphContext) -> tuple[str, ...]:
    """The matmuls that it was paired with: "mm_3 of forward.2 (layers.0.w1)", where others might have had them."""
    if not isinstance(o.site, Bulk):
        return ()
    said = []
    for node in (p.node for p in o.site.matmuls):
        module = module_path(node)
        of = f" of {setting.owners[node]}" if node in setting.owners else ""
        said.append(node.name + of + (f" ({module})" if module else ""))
    return tuple(said)


def _detail(o: Assignment, beside: tuple[str, ...]) -> str:
    """The reason or the choice in a sentence, and who asked for it."""
    if o.miss:
        said = o.miss.detail
    else:
        with_ = f"beside {', '.join(beside)}" if beside else ""
        said = "; ".join(filter(None, (_instead(o), with_, o.choice.reason if o.choice else "")))
    if o.wish is None or o.wish.strategy is None or o.wish.by in said:
        return said
    return "; ".join(filter(None, [said, f"{o.wish.strategy} forced by {o.wish.by}"]))


def _instead(o: Assignment) -> str:
    """Why a bulk site is no pipelined one."""
    why = o.candidate.miss
    return f"not pipelined: {why.reason.value}: {why.detail}" if isinstance(o.site, Bulk) and why else ""
