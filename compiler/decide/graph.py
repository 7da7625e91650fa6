"""The collectives of a graph in their order: the first that takes a matmul has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import sympy
from torch.fx import Graph

from ..cost.choose import Choice
from ..describe import groups_of
from ..fp8.insert import CAST
from ..options import Options
from ..plan import NONE, Decision, Mode, Plan, Reason, Strategy, Table
from ..rule import Forced
from ..sites import Candidate, Miss, Site, find
from ..sites.order import Order
from ..sites.sizes import symbols
from .legal import bulk, no_stripes, pipelined, unknown_size
from .record import carry_scales, decision, merged_away
from .wishes import wishes_of
from .worth import Costs, too_small

Transport = Callable[[str, str, int], str | None]
"""(device type, group name, ranks) -> why the runtime cannot serve this group, or None."""


_HOPELESS = (
    Reason.COLLECTIVE_UNSUPPORTED, Reason.GROUP_NOT_STATIC, Reason.TRIVIAL_GROUP, Reason.DTYPE_UNSUPPORTED,
    Reason.REDUCE_OP_UNSUPPORTED, Reason.SCALES,
)  # fmt: skip
"""Nothing that the user wishes changes these."""


@dataclass(slots=True)
class Decided:
    """A plan and, beside each overlapped decision, the site that the rewrite needs."""

    plan: Plan
    chosen: list[tuple[Site, Strategy | Table, str]] = field(default_factory=list)
    groups: tuple[str, ...] = ()
    """c10d names of the groups of its collectives."""


def decide(graph: Graph, options: Options, phase: str, transport: Transport) -> Decided:
    """Decides every collective of `graph`; `phase` is "forward" or "backward"."""
    order = Order(graph)
    candidates = find(graph)
    ordinals = groups_of(candidates)
    known = frozenset(symbol for symbol, _ in symbols(graph))
    costs = Costs.of(graph, options)
    decisions: list[Decision] = []
    sites: list[tuple[Site, Strategy | Table, str]] = []
    wishes = wishes_of(candidates, options, phase)
    for number, candidate in enumerate(candidates):
        name = f"{phase}.{number}"
        wish = wishes.get(name)
        site, strategy, miss, choice = _one(candidate, costs, wish, order, transport, known)
        decisions.append(decision(candidate, site, strategy, miss, choice, wish, costs.hints, name, phase, ordinals))
        decisions += merged_away(candidate, decisions[-1])
        if site is not None:
            sites.append((site, strategy, name))
    carry_scales(decisions, candidates)
    casts = tuple(n.meta[CAST] for n in graph.nodes if n.op == "call_function" and CAST in n.meta)
    plan = Plan(phase, tuple(decisions), costs.profile(), casts)
    return Decided(plan, [(site, strategy, f"{plan.digest}/{name}") for site, strategy, name in sites], tuple(ordinals))


def _one(
    candidate: Candidate,
    costs: Costs,
    wish: Forced | None,
    order: Order,
    transport: Transport,
    known: frozenset[sympy.Symbol],
) -> tuple[Site | None, Strategy | Table, Miss | None, Choice | None]:
    """The site to rewrite and its strategy, or the reason for none; and the reckoning behind either, where there was one."""
    miss, options, choice = candidate.miss, costs.options, None
    c = candidate.collective
    if miss is not None and miss.reason in _HOPELESS:
        return None, NONE, miss, None
    forced = wish.strategy if wish else None
    if forced == NONE or (options.overlap == "off" and forced is None):
        return None, NONE, Miss(Reason.DISABLED_BY_USER, f"{wish.by} says none" if wish else "overlap='off'"), None
    if forced is not None and forced.striped and (illegal := no_stripes(candidate.match)):
        return None, NONE, Miss(Reason.STRATEGY_ILLEGAL, illegal), None
    assert c.group is not None
    if why := transport(c.node.meta["val"].device.type, c.group, c.ranks):
        return None, NONE, Miss(Reason.NO_TRANSPORT, why), None
    modes = [forced.mode] if forced else [Mode.PIPELINED, Mode.BULK]
    for mode in modes:
        site = pipelined(candidate, order) if mode is Mode.PIPELINED else bulk(candidate, order)
        if isinstance(site, Miss):
            # The reason of the pipelined form explains more than "nothing to run beside it".
            miss = miss or site
            continue
        if small := too_small(site, options, forced):
            return None, NONE, small, None
        if unknown := unknown_size(site, known):
            miss = miss or unknown
            continue
        strategy: Strategy | Table = forced or Strategy(mode, options.chunks if mode is Mode.PIPELINED else 0)
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
