"""candidates -> plan. Every collective gets a Decision; a pure function of graph, options, transport and device profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import sympy
from torch.fx import Graph, Node

from .cost.amounts import bytes_sent, enough, flops
from .cost.choose import Choice, choose
from .cost.load import load
from .cost.of_site import Hints, hints_of, shape_of_site
from .cost.profile import Profile
from .describe import groups_of, place_of, row, work_of
from .merge import MERGED
from .options import Options
from .plan import NONE, Decision, Kind, Mode, Plan, Reason, Strategy
from .rule import Forced, Place
from .rules import UNMATCHED, forced_by_rules
from .saved import fit
from .sites import Bulk, Candidate, Gather, Miss, Reduction, find
from .sites.collectives import Op
from .sites.order import Order
from .sites.sizes import Size, symbols
from .sites.values import shape_of, tensor_of

Site = Gather | Reduction | Bulk
Transport = Callable[[str, str, int], str | None]
"""(device type, group name, ranks) -> why the runtime cannot serve this group, or None."""

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


@dataclass(slots=True)
class _Costs:
    """What decisions of one graph share: the options, the sizes that stand for symbols, and the profiles that were used."""

    options: Options
    hints: dict[sympy.Symbol, int]
    used: dict[str, Profile] = field(default_factory=dict)

    def choose(self, site: Site, chunks: int) -> Choice | None:
        """The predicted best of what the options leave open; None where the site is forced to the standard form, or its sizes
        have no values.

        overlap="force" asks for overlap and not for speed: without a GPU and without a profile of the user's it keeps one
        piece a rank, whatever the shape.
        """
        forced = self.options.overlap == "force"
        device = site.collective.node.meta["val"].device.type
        if forced and (chunks or isinstance(site, Bulk) or (self.options.profile is None and device != "cuda")):
            return None
        shape = shape_of_site(site, self.hints)
        if shape is None:
            return None
        profile = load(self.options.profile, shape.ranks, device)
        self.used[profile.digest] = profile
        return choose(shape, profile, forced, chunks)

    def profile(self) -> str:
        """The names of the profiles that were used, the same on all ranks."""
        return ", ".join(sorted(str(p) for p in self.used.values()))


@dataclass(slots=True)
class Decided:
    """A plan and, beside each overlapped decision, the site that the rewrite needs."""

    plan: Plan
    chosen: list[tuple[Site, Strategy, str]] = field(default_factory=list)


def decide(graph: Graph, options: Options, phase: str, transport: Transport) -> Decided:
    """Decides every collective of `graph`; `phase` is "forward" or "backward"."""
    order = Order(graph)
    candidates = find(graph)
    ordinals = groups_of(candidates)
    known = frozenset(symbol for symbol, _ in symbols(graph))
    costs = _Costs(options, hints_of(graph))
    decisions: list[Decision] = []
    sites: list[tuple[Site, Strategy, str]] = []
    wishes = _wishes(candidates, options, phase)
    for number, candidate in enumerate(candidates):
        name = f"{phase}.{number}"
        wish = wishes.get(name)
        site, strategy, miss, choice = _one(candidate, costs, wish, order, transport, known)
        decisions.append(_decision(candidate, site, strategy, miss, choice, wish, costs.hints, name, phase, ordinals))
        decisions += _merged_away(candidate, decisions[-1])
        if site is not None:
            sites.append((site, strategy, name))
    plan = Plan(phase, tuple(decisions), costs.profile())
    return Decided(plan, [(site, strategy, f"{plan.digest}/{name}") for site, strategy, name in sites])


def _wishes(candidates: list[Candidate], options: Options, phase: str) -> dict[str, Forced]:
    """What the user forces, by site id: the plan, else the last rule that matches. OptionError where a whole saved plan does
    not fit the graph."""
    if not candidates or not (options.plan or options.rules or options.saved):
        return {}
    places = [place_of(c, f"{phase}.{i}", phase, _kinds(c)) for i, c in enumerate(candidates)]
    UNMATCHED.check(phase, places, () if options.saved else [pattern for pattern, _ in options.plan], options.rules)
    saved = fit(options.saved, phase, places)

    def wish(place: Place) -> Forced | None:
        by_plan = saved.get(place.id) if options.saved else options.forced_by_plan(place.id)
        return by_plan or forced_by_rules(options.rules, place)

    return {p.id: found for p in places if (found := wish(p)) is not None}


def _kinds(candidate: Candidate) -> tuple[str, ...]:
    """What a rule may call a candidate: its collective, and the site that it makes with its matmuls."""
    op = candidate.collective.op
    matched = (_MATCHED[op].value,) if op is not None and candidate.match is not None else ()
    return (_PLAIN[op].value, *matched)


def _one(
    candidate: Candidate,
    costs: _Costs,
    wish: Forced | None,
    order: Order,
    transport: Transport,
    known: frozenset[sympy.Symbol],
) -> tuple[Site | None, Strategy, Miss | None, Choice | None]:
    """The site to rewrite and its strategy, or the reason for none; and the reckoning behind either, where there was one."""
    miss, options, choice = candidate.miss, costs.options, None
    c = candidate.collective
    hopeless = (Reason.COLLECTIVE_UNSUPPORTED, Reason.GROUP_NOT_STATIC, Reason.TRIVIAL_GROUP, Reason.DTYPE_UNSUPPORTED)
    if miss is not None and miss.reason in (*hopeless, Reason.REDUCE_OP_UNSUPPORTED):
        return None, NONE, miss, None
    forced = wish.strategy if wish else None
    if forced == NONE or (options.overlap == "off" and forced is None):
        return None, NONE, Miss(Reason.DISABLED_BY_USER, f"{wish.by} says none" if wish else "overlap='off'"), None
    if forced is not None and forced.striped and (illegal := _no_stripes(candidate.match)):
        return None, NONE, Miss(Reason.STRATEGY_ILLEGAL, illegal), None
    assert c.group is not None
    if why := transport(c.node.meta["val"].device.type, c.group, c.ranks):
        return None, NONE, Miss(Reason.NO_TRANSPORT, why), None
    modes = [forced.mode] if forced else [Mode.PIPELINED, Mode.BULK]
    for mode in modes:
        site = _pipelined(candidate, order) if mode is Mode.PIPELINED else _bulk(candidate, order)
        if isinstance(site, Miss):
            # The reason of the pipelined form explains more than "nothing to run beside it".
            miss = miss or site
            continue
        if small := _too_small(site, options, forced):
            return None, NONE, small, None
        if unknown := _unknown_size(site, known):
            miss = miss or unknown
            continue
        strategy = forced or Strategy(mode, options.chunks if mode is Mode.PIPELINED else 0)
        found = None if forced else costs.choose(site, options.chunks if mode is Mode.PIPELINED else 0)
        if found is not None:
            choice = choice or found
            if found.strategy == NONE:
                miss = miss or Miss(Reason.NO_GAIN, found.reason)
                if mode is Mode.PIPELINED:
                    break  # what it could run beside may be another site's own matmul, which gains more by it
                continue
            strategy = found.strategy
        if failed := order.fuse(site.members):
            miss = miss or failed
            continue
        return site, strategy, None, found
    return None, NONE, miss or Miss(Reason.NO_MATMUL, "no matmul produces, consumes or can run beside it"), choice


def _no_stripes(match: Gather | Reduction | None) -> str:
    """Why this cannot run in stripes, "" where it can (or where something else keeps it from being pipelined)."""
    if isinstance(match, Gather):
        return "stripes cut a product that is reduced; here shards are gathered"
    return "stripes cut shards, and those of the last dim cannot be cut" if match is not None and match.last else ""


def _pipelined(candidate: Candidate, order: Order) -> Site | Miss:
    match = candidate.match
    if match is None:
        return candidate.miss or Miss(Reason.NO_MATMUL, "no matmul touches its tensor")
    taken = order.taken
    if isinstance(match, Reduction):
        if any(t.node in taken for t in match.terms):
            return Miss(Reason.MATMUL_TAKEN, "its matmul already hides another collective")
        return match
    free = _without(match, {k.product.node for k in match.consumers if k.product.node in taken})
    if not free.consumers:
        return Miss(Reason.MATMUL_TAKEN, "its matmuls already hide another collective")
    # Consumers whose other operand needs a result of the site would close a circle: they read the kept tensor instead.
    while circle := order.conflicts(free.members):
        late = {k.product.node for k in free.consumers if k.operand.node in circle}
        if not late or len(late) == len(free.consumers):
            return Miss(
                Reason.DEPENDENT_OPERAND, f"{min(n.name for n in circle)} needs the gathered tensor and feeds its matmul"
            )
        free = _without(free, late)
    return free


def _without(match: Gather, products: set[Node]) -> Gather:
    """`match` less some consumers, which become other users of the gathered tensor."""
    if not products:
        return match
    gone = [k for k in match.consumers if k.product.node in products]
    holders = [n for k in gone for n in k.product.node.all_input_nodes if n in match.holders]
    kept = tuple(k for k in match.consumers if k.product.node not in products)
    return replace(match, consumers=kept, roots=tuple(dict.fromkeys((*match.roots, *holders))))


def _bulk(candidate: Candidate, order: Order) -> Site | Miss:
    free = [p for p in candidate.beside if p.node not in order.taken]
    if not free:
        if candidate.beside:
            return Miss(Reason.MATMUL_TAKEN, "every independent matmul already hides another collective")
        return Miss(Reason.NO_MATMUL, "no matmul produces, consumes or can run beside it")
    chosen: list = []
    for p in free:  # pairwise independent, and no circle through what was fused before
        trial = Bulk(candidate.collective, (*chosen, p))
        if not order.conflicts(trial.members) and not _feeds(trial):
            chosen.append(p)
            if len(enough(tuple(chosen), bytes_sent(trial))) < len(chosen):
                break
    if not chosen:
        return Miss(Reason.DEPENDENT_OPERAND, "every independent matmul is tied to it through another site")
    chosen = list(enough(tuple(chosen), bytes_sent(Bulk(candidate.collective, tuple(chosen)))))
    return Bulk(candidate.collective, tuple(chosen))


def _feeds(site: Bulk) -> bool:
    """Does a product read another member directly?"""
    inside = set(site.members)
    return any(n in inside for p in site.products for n in p.node.all_input_nodes)


def _unknown_size(site: Site, known: frozenset[sympy.Symbol]) -> Miss | None:
    """A size the op would need that cannot be computed from the graph's inputs."""
    needed: list[Size] = [] if isinstance(site, Bulk) else [site.blocks.outer, site.rows, site.cols]
    needed += [s for p in _products(site) for o in (p.lhs, p.rhs) for s in o.shape]
    needed += [s for n in site.members if tensor_of(n) is not None for s in shape_of(n)]
    for s in dict.fromkeys(needed):
        if isinstance(s, int):
            continue
        atoms = [a for a in sympy.preorder_traversal(s) if not isinstance(a, sympy.Mul | sympy.Add)]
        if not all(a in known or (a.is_Integer and a.is_positive) for a in atoms):
            return Miss(Reason.DYNAMIC_SHAPE, f"size {s} cannot be computed from the graph's inputs")
    return None


def _too_small(site: Site, options: Options, forced: Strategy | None) -> Miss | None:
    if options.overlap == "force" or forced is not None:
        return None
    sent = bytes_sent(site)
    if sent is None or sent >= options.min_bytes:
        return None
    return Miss(Reason.BELOW_THRESHOLD, f"a rank sends {sent} bytes; overlap='auto' starts at min_bytes={options.min_bytes}")


def _decision(
    candidate: Candidate,
    site: Site | None,
    strategy: Strategy,
    miss: Miss | None,
    choice: Choice | None,
    wish: Forced | None,
    hints: Hints,
    name: str,
    phase: str,
    ordinals: dict[str, str],
) -> Decision:
    shown = site or candidate.match
    op = candidate.collective.op
    matched = candidate.match is not None and not isinstance(site, Bulk)
    products = _products(shown)
    work = [flops(p) for p in products]
    legal = ((Mode.PIPELINED.value,) if candidate.match is not None else ()) + ((Mode.BULK.value,) if candidate.beside else ())
    return Decision(
        id=name,
        phase=phase,
        strategy=strategy,
        reason=miss.reason if miss else None,
        detail=_detail(candidate, site, miss, choice, wish),
        predicted=tuple((text, round(p.us, 2)) for text, p in choice.predictions.items()) if choice else (),
        work=work_of(candidate, shown, hints),
        kind=_MATCHED[op] if matched and op else _PLAIN[op],
        options=legal,
        matmuls=tuple(p.node.name for p in products),
        bytes=bytes_sent(shown) if shown else None,
        flops=sum(f for f in work if f is not None) if work and None not in work else None,
        **row(candidate, shown, ordinals),
    )


def _merged_away(candidate: Candidate, into: Decision) -> list[Decision]:
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


def _detail(candidate: Candidate, site: Site | None, miss: Miss | None, choice: Choice | None, wish: Forced | None) -> str:
    """The reason or the choice in a sentence, and who asked for it."""
    said = miss.detail if miss else "; ".join(filter(None, (_instead(candidate, site), choice.reason if choice else "")))
    if wish is None or wish.by in said:
        return said
    return "; ".join(filter(None, [said, f"{wish.strategy} forced by {wish.by}"]))


def _instead(candidate: Candidate, site: Site | None) -> str:
    """Why a bulk site is no pipelined one."""
    why = candidate.miss
    return f"not pipelined: {why.reason.value}: {why.detail}" if isinstance(site, Bulk) and why else ""


def _products(site: Site | None) -> list:
    if site is None:
        return []
    if isinstance(site, Gather):
        return [k.product for k in site.consumers]
    return list(site.terms if isinstance(site, Reduction) else site.products)
