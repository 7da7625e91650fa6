"""candidate -> the strategy of its fused form, for collectives of few tokens (cost/fused_choice.py).

The fused form takes its whole time from the graph. A plain collective runs concurrently with the matmuls between it and its
wait, so where there are any it stays plain. The option `min_bytes` does not apply: few bytes are what the fused form is for.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from ..cost.choice import StrategyChoice
from ..graph.compute import is_compute
from ..match.collectives import Collective
from ..match.site import Fused
from ..plan.strategy import NONE
from .profitability import SiteCosts


def choose_fused_form(site: Fused, costs: SiteCosts) -> StrategyChoice | None:
    """Return the choice with overlap="auto"; None where nothing was measured for its size, or predictions do not decide."""
    c = site.collective
    if not costs.policy.may_fuse or not costs.policy.is_weighed(c.node.meta["val"].device.type):
        return None
    choice = costs.choose_fused(site)
    if choice is None or choice.strategy == NONE:
        return choice
    if node := find_concurrent(c):
        reason = f"{choice.reason}; but the plain collective runs concurrently with {node.name}"
        return replace(choice, strategy=NONE, reason=reason, gain_us=0.0)
    return choice


def find_concurrent(c: Collective) -> Node | None:
    """Return the first matmul or attention between the collective and its wait, in the graph's order."""
    node = c.node.next
    while node is not c.wait and node.op != "root":
        if is_compute(node):
            return node
        node = node.next
    return None
