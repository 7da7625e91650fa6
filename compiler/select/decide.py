"""The decisions for all collectives of a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph, Node

from ub_overlap.runtime.site_id import SiteId

from ..cost.policy import Policy
from ..graph.graph_inputs import NO_NEIGHBORS, Neighbors
from ..graph.joint_graph import is_in_backward
from ..graph.size_sources import SizeSources
from ..joint.joint_decision import joint_decision
from ..match import Candidate, Miss, find_candidates
from ..match.fusion_order import FusionOrder
from ..options import Options
from ..overrides.requested_strategy import Override
from ..plan.chosen_site import ChosenSite
from ..plan.decision import Decision
from ..plan.plan import Plan
from ..plan.reasons import Reason
from ..plan.strategy import NONE, Mode
from ..windows.choose import choose_splits
from ..windows.layout import GraphLayout
from .alternatives import Alternative, AlternativeFinder, Alternatives
from .apply_overrides import find_overrides
from .assignment import Assignment, assign_alternatives
from .decision_record import GraphContext, make_decision, merge_scales, merged_away
from .legality import FINAL, find_illegal, unknown_size
from .peak_memory import PeakMemory
from .profitability import SiteCosts
from .reduce_dtype import apply_reduce_dtype

Transport = Callable[[str, str, int], str | None]
"""(device type, group name, ranks) -> why the runtime cannot serve this group, or None."""


@dataclass(slots=True)
class Decided:
    """A plan, and the site of each overlapped decision for the rewrite."""

    plan: Plan
    chosen: list[ChosenSite] = field(default_factory=list)
    groups: tuple[str, ...] = ()
    """c10d names of the groups of its collectives."""
    layout: GraphLayout | None = None
    """The order of the graph with the places of split collectives; None without any."""


def decide(
    graph: Graph,
    options: Options,
    phase: str,
    transport: Transport,
    calling_line: str = "",
    neighbors: Neighbors = NO_NEIGHBORS,
    parameters: Collection[Node] | None = None,
) -> Decided:
    """Decide every collective of `graph`; `phase`: plan/phase.py.

    `calling_line`: the source of sites that have no line of the user's code in the graph. `neighbors`: matrices that
    lie next to each other in memory. `parameters`: placeholders of parameters, None where they are not known.
    """
    candidates = find_candidates(graph)
    if phase != "forward":
        of_backward = candidates if phase == "backward" else [c for c in candidates if is_in_backward(c.collective.node)]
        apply_reduce_dtype(graph, of_backward, options.gradient_dtype)
    names = [f"{phase}.{number}" for number in range(len(candidates))]
    overrides = find_overrides(candidates, options, phase)
    order, costs = FusionOrder(graph), SiteCosts.of(graph, Policy.of(options), neighbors)
    sources = SizeSources(graph.find_nodes(op="placeholder"))
    finder = AlternativeFinder(costs, order, lambda site: unknown_size(site, sources))
    found: list[Alternatives] = []
    for name, candidate in zip(names, candidates, strict=True):
        override = overrides.get(name)
        miss = _refuse(candidate, override, options, transport)
        if miss:
            found.append(Alternatives(miss=miss, is_refused=True))
        elif override and override.strategy and override.strategy.mode is Mode.SPLIT:
            found.append(Alternatives(miss=candidate.miss))
        elif candidate.collective.hosts > 1:
            hosts = f"its ranks are on {candidate.collective.hosts} hosts: only split collectives run there, over c10d"
            found.append(Alternatives(miss=Miss(Reason.NO_TRANSPORT, hosts)))
        else:
            found.append(finder.find(candidate, override))

    def assign(alternatives: Sequence[Alternatives]) -> tuple[list[Assignment], FusionOrder]:
        counts_memory = any(one.counts_memory and any(a.moves_matmuls for a in one.ranked) for one in alternatives)
        memory = PeakMemory.of(graph, costs.hints) if counts_memory else PeakMemory.uncounted()
        order = FusionOrder(graph)
        return assign_alternatives(alternatives, order, memory), order

    by_number = {i: overrides[name] for i, name in enumerate(names) if name in overrides}
    choice = choose_splits(graph, candidates, found, by_number, costs, assign, parameters)
    assignments = choice.assignments

    by_name = dict(zip(names, candidates, strict=True))
    context = GraphContext.of(graph, phase, costs.hints, by_name, calling_line, options.pack != "off")
    decisions: list[Decision] = []
    selected: list[tuple[str, Alternative]] = []
    for i, (name, candidate, assignment) in enumerate(zip(names, candidates, assignments, strict=True)):
        window, sender = choice.windows.get(i), choice.buckets.get(i, i)
        if window is not None and i in choice.buckets:
            window = replace(window, bucket=names[sender])
        decision = make_decision(name, candidate, overrides.get(name), assignment, context, window)
        decisions += [decision, *merged_away(candidate, decision)]
        if assignment.alternative and sender == i:
            selected.append((name, assignment.alternative))
    merge_scales(decisions, candidates)
    casts = tuple(cast for n in graph.nodes if n.op == "call_function" and (cast := joint_decision(n).cast) is not None)
    plan = Plan(phase, tuple(decisions), costs.profile_names(), casts)
    chosen = [ChosenSite(SiteId(plan.digest, name), a.site, a.strategy, a.wire_dtype) for name, a in selected]
    entries = {str(SiteId(plan.digest, names[i] + part)): entry for (i, part), entry in choice.entries.items()}
    inner = {str(SiteId(plan.digest, names[i])) for i in choice.inner}
    layout = GraphLayout(tuple(choice.order.items), entries, inner) if entries else None
    return Decided(plan, chosen, tuple(context.groups), layout)


def _refuse(candidate: Candidate, override: Override | None, options: Options, transport: Transport) -> Miss | None:
    """Return why a candidate has no alternatives, before anything is predicted."""
    miss, c = candidate.miss, candidate.collective
    if miss is not None and miss.reason in FINAL:
        return miss
    forced = override.strategy if override else None
    if forced == NONE or (options.overlap == "off" and forced is None):
        return Miss(Reason.DISABLED_BY_USER, f"{override.by} says none" if override and forced else "overlap='off'")
    if forced is not None and (illegal := find_illegal(candidate, forced, options.pack != "off")):
        return Miss(Reason.STRATEGY_ILLEGAL, illegal)
    assert c.group is not None
    if why := transport(c.node.meta["val"].device.type, c.group, c.ranks):
        return Miss(Reason.NO_TRANSPORT, why)
    return None
