"""The record of the joint pass's decision for one node.

Decisions on the joint graph are read again after the partitioner, on its halves. They are stored in `node.meta`, which the
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
    """The decision for one node of a joint graph. Default values mean no decision."""

    saved_activation: SavedActivation | None = None
    """Gathers: the form in which backward keeps the result."""
    merged_count: int = 1
    """Collectives: the number of the program's collectives that were merged into it."""
    cast: CastDecision | None = None
    """Matmuls of linears: the float8 decision."""
    carries_scales: bool = False
    """all_reduces: whether it reduces the amax values that scales are computed from."""
    reordered: str = ""
    """all_reduces: the meshes of a reduction that scatter_first moved in front, and of its own, equal on all ranks."""
    change_note: str = ""
    """What scatter_first or send_once changed, or why scatter_first left an order."""
    saved_bytes: int | None = 0
    """Bytes that a rank sends less than in the traced graph. None where dynamic."""
    why_unmatched: tuple[Reason, str] | None = None
    """Gathers: the reason why casts to float8 stay after it."""


_UNDECIDED = JointDecision()


def joint_decision(node: Node) -> JointDecision:
    """Return the record of `node`."""
    record: JointDecision = node.meta.get(_KEY, _UNDECIDED)
    return record


def record_decision(node: Node, **changes: Any) -> None:
    """Update fields of the record of `node`."""
    node.meta[_KEY] = replace(joint_decision(node), **changes)
