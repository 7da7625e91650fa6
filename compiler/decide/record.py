"""What came out for a candidate, as a Decision: everything needed to explain it."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from ..cost.amounts import bytes_sent, flops
from ..cost.choose import Choice
from ..cost.of_site import Hints
from ..forced.rule import Forced
from ..merge import MERGED
from ..origin import module_of
from ..plan import Decision, Kind, Mode, Pairing, Strategy, Table
from ..reports.describe import row, work_of
from ..save import KEPT
from ..sites import Bulk, Candidate, Miss, Site
from ..sites.collectives import Op
from .carry import rows_at

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


def decision(
    candidate: Candidate,
    site: Site | None,
    strategy: Strategy | Table,
    miss: Miss | None,
    choice: Choice | None,
    wish: Forced | None,
    hints: Hints,
    name: str,
    phase: str,
    ordinals: dict[str, str],
    beside: tuple[str, ...],
    places: dict[Node, str],
    weighed: Pairing | None,
) -> Decision:
    """`name`: the site's id. `ordinals`: groups by c10d name, as describe.groups_of numbers them. `beside`: what it was paired
    with. `places`: what all ranks call the graph's matmuls. `weighed`: what pairing it would have
    cost and saved, or did."""
    shown = site or candidate.match
    op = candidate.collective.op
    matched = candidate.match is not None and not isinstance(site, Bulk)
    products = shown.products if shown else ()
    work = [flops(p) for p in products]
    said = _detail(candidate, site, miss, choice, wish, beside)
    kept = candidate.collective.node.meta.get(KEPT) if phase == "forward" else None
    legal = ((Mode.PIPELINED.value,) if candidate.match is not None else ()) + ((Mode.BULK.value,) if candidate.beside else ())
    return Decision(
        id=name,
        phase=phase,
        strategy=strategy,
        reason=miss.reason if miss else None,
        detail="; ".join(filter(None, (said, str(weighed or ""), str(kept or "")))),
        predicted=tuple((text, round(p.us, 2)) for text, p in choice.predictions.items()) if choice else (),
        work=work_of(candidate, shown, hints),
        rows=rows_at(shown, hints) if shown else None,
        kind=_MATCHED[op] if matched and op else _PLAIN[op],
        options=legal,
        matmuls=tuple(p.node.name for p in products),
        takes=tuple(places[p.node] for p in products) if site else (),
        paired=beside,
        kept=kept,
        pairing=weighed,
        bytes=bytes_sent(shown) if shown else None,
        flops=sum(f for f in work if f is not None) if work and None not in work else None,
        **row(candidate, shown, ordinals),
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
    gone = candidate.collective.node.meta.get(MERGED, 1) - 1
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


def paired(site: Site, owners: dict[Node, str]) -> tuple[str, ...]:
    """The matmuls that a collective was paired with: "mm_3 (layers.0.feed_forward.w1)", and of which site they might have been
    (`owners`: site ids by matmul)."""
    if not isinstance(site, Bulk):
        return ()
    said = []
    for node in (p.node for p in site.products):
        module = module_of(node)
        of = f" of {owners[node]}" if node in owners else ""
        said.append(node.name + of + (f" ({module})" if module else ""))
    return tuple(said)


def _detail(
    candidate: Candidate,
    site: Site | None,
    miss: Miss | None,
    choice: Choice | None,
    wish: Forced | None,
    beside: tuple[str, ...],
) -> str:
    """The reason or the choice in a sentence, and who asked for it."""
    if miss:
        said = miss.detail
    else:
        with_ = f"beside {', '.join(beside)}" if beside else ""
        said = "; ".join(filter(None, (_instead(candidate, site), with_, choice.reason if choice else "")))
    if wish is None or wish.by in said:
        return said
    return "; ".join(filter(None, [said, f"{wish.strategy} forced by {wish.by}"]))


def _instead(candidate: Candidate, site: Site | None) -> str:
    """Why a bulk site is no pipelined one."""
    why = candidate.miss
    return f"not pipelined: {why.reason.value}: {why.detail}" if isinstance(site, Bulk) and why else ""
