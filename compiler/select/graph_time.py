"""The predicted time of a graph as decided, to compare two forms of one computation."""

from __future__ import annotations

from torch.fx import Graph

from ..cost.assumed_sizes import assume_sizes
from ..cost.policy import Policy
from ..cost.site_sizes import hints_of
from ..plan.plan import Plan
from ..reports.outlook import outlook
from ..windows.node_times import NodeTimes

UNKNOWN_US = 50.0
"""A collective without a prediction: the exchange of a few integers, which the host then reads. Assumed."""


def graph_us(graph: Graph, plan: Plan, policy: Policy, device: str) -> float:
    """Return the microseconds of a graph on `device`: its compute, and its collectives as decided in `plan`."""
    ranks = max((d.ranks for d in plan.decisions), default=None)
    hints = assume_sizes(graph, hints_of(graph))
    times = NodeTimes.of(graph, policy.profile(ranks, device), hints)
    us = sum(times.us(n) for n in graph.nodes)
    for d in plan.decisions:
        predicted = outlook(d, policy.profile(d.ranks, device))
        us += UNKNOWN_US if predicted is None else predicted.none.communication_us - predicted.gain_us
    return us
