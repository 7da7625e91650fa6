"""The collectives of a graph: what is open to each, which of it fits together and saves the most, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Graph

from ub_overlap.runtime.site_id import SiteId

from ..cost.policy import Policy
from ..graph.sizes import size_symbols
from ..joint.joint_decision import joint_decision
from ..match import Candidate, Miss, find_candidates
from ..match.fusion_order import FusionOrder
from ..options import Options
from ..overrides.requested_strategy import Override
from ..plan.chosen_site import ChosenSite
from ..plan.decision import Decision
from ..plan.plan import Plan
from ..plan.reasons import Reason
from ..plan.strategy import NONE
from .alternatives import Alternative, AlternativeFinder, Alternatives
from .apply_overrides import find_overrides
from .decision_record import Assignment, GraphContext, carry_scales, decision, merged_away
from .legality import no_stripes, unknown_size
from .packing import pair
from .peak_memory import PeakMemory
from .profitability import SiteCosts

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
    chosen: list[ChosenSite] = field(default_factory=list)
    groups: tuple[str, ...] = ()
    """c10d names of the groups of its collectives."""


def decide(graph: Graph, options: Options, phase: str, transport: Transport) -> Decided:
    """Decides every collective of `graph`; `phase` is "forward" or "backward"."""
    candidates = find_candidates(graph)
    names = [f"{phase}.{number}" for number in range(len(candidates))]
    wishes = find_overrides(candidates, options, phase)
    order, costs = FusionOrder(graph), SiteCosts.of(graph, options, Policy.of(options))
    known = frozenset(symbol for symbol, _ in size_symbols(graph))
    finder = AlternativeFinder(costs, order, lambda site: unknown_size(site, known))
    offers: list[Alternatives] = []
    for name, candidate in zip(names, candidates, strict=True):
        wish = wishes.get(name)
        closed = _closed(candidate, wish, options, transport)
        offers.append(Alternatives(miss=closed) if closed else finder.of(candidate, wish))
    counts = any(offer.limited and any(way.bulk for way in offer.ways) for offer in offers)
    outcomes = pair(offers, order, PeakMemory.of(graph, costs.hints) if counts else PeakMemory.uncounted())

    setting = GraphContext.of(graph, phase, costs.hints, dict(zip(names, candidates, strict=True)))
    decisions: list[Decision] = []
    ways: list[tuple[str, Alternative]] = []
    for name, candidate, offer, (found, weighed) in zip(names, candidates, offers, outcomes, strict=True):
        outcome = Assignment(name, candidate, found, offer, wishes.get(name), weighed)
        made = decision(outcome, setting)
        decisions += [made, *merged_away(candidate, made)]
        if outcome.way:
            ways.append((name, outcome.way))
    carry_scales(decisions, candidates)
    casts = tuple(cast for n in graph.nodes if n.op == "call_function" and (cast := joint_decision(n).cast) is not None)
    plan = Plan(phase, tuple(decisions), costs.profile(), casts)
    chosen = [ChosenSite(SiteId(plan.digest, name), way.site, way.strategy, way.wire_dtype) for name, way in ways]
    return Decided(plan, chosen, tuple(setting.groups))


def _closed(candidate: Candidate, wish: Override | None, options: Options, transport: Transport) -> Miss | None:
    """Why nothing is open to a candidate, before anything is weighed."""
    miss, c = candidate.miss, candidate.collective
    if miss is not None and miss.reason in _HOPELESS:
        return miss
    forced = wish.strategy if wish else None
    if forced == NONE or (options.overlap == "off" and forced is None):
        return Miss(Reason.DISABLED_BY_USER, f"{wish.by} says none" if wish and forced else "overlap='off'")
    if forced is not None and forced.striped and (illegal := no_stripes(candidate.match)):
        return Miss(Reason.STRATEGY_ILLEGAL, illegal)
    assert c.group is not None
    if why := transport(c.node.meta["val"].device.type, c.group, c.ranks):
        return Miss(Reason.NO_TRANSPORT, why)
    return None
