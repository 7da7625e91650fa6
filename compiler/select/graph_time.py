"""The predicted time of a graph as decided, to compare two forms of one computation.

Two clocks: the device computes kernels in the order of the plan, the host issues them. The host is ahead until it reads a
number, which waits for the device. Behind a read the device idles until the host has issued what is next. So many short kernels
behind a read cost what the host takes for them. A collective goes on meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ub_overlap.runtime.site_id import SiteId

from ..cost.assumed_sizes import assume_sizes
from ..cost.host_time import COLLECTIVE_HOST_US, HOST_US, host_us
from ..cost.policy import Policy
from ..cost.site_sizes import hints_of
from ..graph.aten import aten
from ..match.collectives import is_collective
from ..match.window import Window
from ..reports.outlook import outlook
from ..windows.layout import GraphLayout
from ..windows.node_times import NodeTimes
from ..windows.placement import Placed
from .decide import Decided

UNKNOWN_US = 50.0
"""A collective without a prediction: the exchange of a few integers, which the host then reads. Assumed."""
READ_US = 20.0
"""From the end of what the host reads to its first kernel behind it. Assumed."""


def graph_us(graph: Graph, decided: Decided, policy: Policy, device: str) -> float:
    """Return the microseconds of a graph on `device`: its compute, its collectives as decided, and waits for the host."""
    plan = decided.plan
    ranks = max((d.ranks for d in plan.decisions), default=None)
    times = NodeTimes.of(graph, policy.profile(ranks, device), assume_sizes(graph, hints_of(graph)))
    exposed = dict[str, float]()
    for d in plan.decisions:
        predicted = outlook(d, policy.profile(d.ranks, device))
        us = UNKNOWN_US if predicted is None else predicted.none.communication_us - predicted.gain_us
        exposed[str(SiteId(plan.digest, d.id))] = us
    return issue(list(graph.nodes), decided.layout, times, exposed)


def issue(nodes: Sequence[Node], layout: GraphLayout | None, times: NodeTimes, exposed: Mapping[str, float]) -> float:
    """Return when the device has ended what the host issues: `nodes`, in the order of `layout` where there is one.

    `exposed`: by site the microseconds of a collective that nothing hides. Those of split ones pass at their finish.
    """
    entries = layout.entries if layout else {}
    halves = _in_order(entries)
    clocks, idle_at = _Clocks(), dict[str, float]()
    clocks.device += sum(us for site, us in exposed.items() if site not in entries)
    split = {n for window, _ in entries.values() for w in window.each for n in (w.collective.node, w.collective.wait)}
    for place, node in enumerate(layout.items if layout else nodes):
        while halves and halves[0][0] <= place:
            _, _, site, is_start = halves.pop(0)
            clocks.issue(COLLECTIVE_HOST_US if is_start else HOST_US)
            if is_start:
                idle_at[site] = clocks.idle
            else:
                clocks.receive(exposed.get(site, 0.0), idle_at[site])
        if node.target is torch.ops.ub_overlap.start_host_read.default:
            clocks.issue(3 * HOST_US)
            clocks.read_from = clocks.device
        elif node.target is torch.ops.ub_overlap.finish_host_read.default:
            clocks.read(clocks.read_from)
        elif node.target is aten._local_scalar_dense.default and not _is_on_host(node):
            clocks.read(clocks.device)
        elif is_collective(node) and node not in split:
            clocks.issue(COLLECTIVE_HOST_US)
        elif us := times.us(node):
            clocks.issue(host_us(node.target))
            clocks.compute(us)
    return clocks.device


@dataclass(slots=True)
class _Clocks:
    """`device`: when it has ended what was issued so far. `host`: when it has issued that. `idle`: of the device, in all."""

    device: float = 0.0
    host: float = -math.inf
    idle: float = 0.0
    used: float = 0.0
    """The part of `idle` in which collectives went on."""
    read_from: float = 0.0

    def issue(self, us: float) -> None:
        self.host += us

    def compute(self, us: float) -> None:
        waits = max(0.0, self.host - self.device)
        self.idle += waits
        self.device += waits + us

    def receive(self, exposed: float, idle_before: float) -> None:
        """Let the device wait for a collective. It has idled for `idle_before` in all when the collective started.

        The collective went on in what it has idled since, unless another one did.
        """
        begin = max(idle_before, self.used)
        meanwhile = min(exposed, self.idle - begin)
        self.used = begin + meanwhile
        self.device += exposed - meanwhile

    def read(self, ended: float) -> None:
        """Let the host wait for what the device had ended at `ended`."""
        self.host = max(self.host, ended + READ_US)


def _in_order(entries: Mapping[str, tuple[Window, Placed]]) -> list[tuple[int, int, str, bool]]:
    """Return (place, number, site, whether it is the start) of all starts and finishes, in the order of the plan."""
    found = list[tuple[int, int, str, bool]]()
    for site, (_, placed) in entries.items():
        found.append((placed.start, placed.start_number, site, True))
        found.append((placed.finish, placed.finish_number, site, False))
    return sorted(found)


def _is_on_host(read: Node) -> bool:
    value = read.args[0].meta.get("val") if isinstance(read.args[0], Node) else None
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"
