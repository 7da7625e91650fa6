"""The record of what the pass on the joint graph decided for one node.

Decisions on the joint graph are read again after the partitioner, on its halves. They travel in `node.meta`, which the
partitioner copies: one key, one frozen record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from ..plan.decision import CastDecision, SavedActivation
from ..plan.reasons import Reason

_KEY = "ub_overlap_joint_decision"


@dataclass(frozen=True, slots=True)
class JointDecision:
    """What was decided for one node of a joint graph; the defaults where nothing was."""

    saved_activation: SavedActivation | None = None
    """Of a gather: what backward keeps of its result."""
    merged_count: int = 1
    """Of an all_reduce: the number of the program's all_reduces that it stands for."""
    cast: CastDecision | None = None
    """Of a product of a linear: its float8 decision."""
    carries_scales: bool = False
    """Of an all_reduce: whether it reduces the amax values that scales are computed from."""
    why_unmatched: tuple[Reason, str] | None = None
    """Of a gather: why its casts to float8 stay behind it."""


_UNDECIDED = JointDecision()


def joint_decision(node: Node) -> JointDecision:
    """Return the record of `node`."""
    record: JointDecision = node.meta.get(_KEY, _UNDECIDED)
    return record


def record_decision(node: Node, **changes: Any) -> None:
    """Update fields of the record of `node`."""
    node.meta[_KEY] = replace(joint_decision(node), **changes)
