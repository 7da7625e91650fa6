"""The order in which each rank of a pipeline computes, by schedule of torch.distributed.pipelining.

GPipe and 1F1B are written here, as torch's classes run them without a table. The others are the tables of torch's classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

from ub_overlap.runtime.errors import OptionError

SCHEDULES = {
    "GPipe": 1, "1F1B": 1, "LoopedBFS": 0, "Interleaved1F1B": 0, "InterleavedZeroBubble": 0, "ZBVZeroBubble": 2, "DualPipeV": 2,
}  # fmt: skip
"""Schedules, with the stages per rank that they need; 0: two or more."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute gradients of inputs and of weights apart."""
_VS = ("ZBVZeroBubble", "DualPipeV")


class Work(Enum):
    """What a rank computes for one microbatch of a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, slots=True)
class PipelineAction:
    """One computation. `sends_with`: how many actions follow before its message is sent (overlapped forward and backward)."""

    work: Work
    stage: int
    microbatch: int
    sends_with: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """The actions of all ranks, and the rank of each stage."""

    schedule: str
    ranks: tuple[tuple[PipelineAction, ...], ...]
    rank_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.rank_of)


def fits(schedule: str, virtual: int) -> bool:
    """Return whether a schedule runs with `virtual` stages on each rank."""
    needed = SCHEDULES[schedule]
    return virtual == needed if needed else virtual > 1


def pipeline_order(schedule: str, ranks: int, virtual: int, microbatches: int) -> PipelineOrder:
    """Return the order of a schedule. OptionError where torch refuses the numbers."""
    if schedule in ("GPipe", "1F1B"):
        order = _gpipe if schedule == "GPipe" else _one_forward_one_backward
        return PipelineOrder(schedule, tuple(order(r, ranks, microbatches) for r in range(ranks)), tuple(range(ranks)))
    return _of_torch(schedule, ranks, virtual, microbatches)


def _gpipe(rank: int, ranks: int, microbatches: int) -> tuple[PipelineAction, ...]:
    works = (Work.FORWARD, Work.BACKWARD)
    return tuple(PipelineAction(work, rank, m) for work in works for m in range(microbatches))


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> tuple[PipelineAction, ...]:
    forward = [PipelineAction(Work.FORWARD, rank, m) for m in range(microbatches)]
    backward = [PipelineAction(Work.BACKWARD, rank, m) for m in range(microbatches)]
    warm = min(microbatches, ranks - rank)
    out = forward[:warm]
    for m, action in enumerate(backward):
        out.append(action)
        out += forward[warm + m : warm + m + 1]
    return tuple(out)


def _of_torch(schedule: str, ranks: int, virtual: int, microbatches: int) -> PipelineOrder:
    from torch.distributed.pipelining.schedules import get_schedule_class

    count = ranks * virtual
    stages: list[Any] = [
        SimpleNamespace(num_stages=count, group_size=ranks, group_rank=0, stage_index=i, submod=None, is_last=False)
        for i in range(virtual)
    ]
    try:
        table = get_schedule_class(schedule)(stages, microbatches, loss_fn=lambda *_: None).pipeline_order  # type: ignore[call-arg]
    except ValueError as error:
        raise OptionError(
            what=f"torch's {schedule} does not run with these numbers",
            where="--microbatches",
            got=f"{microbatches} microbatches, {ranks} ranks with {virtual} stages each",
            expected=str(error),
        ) from error
    rank_of = tuple(min(s, 2 * ranks - 1 - s) if schedule in _VS else s % ranks for s in range(count))
    return PipelineOrder(schedule, tuple(_actions(table[rank]) for rank in range(ranks)), rank_of)


def _actions(row: list[Any]) -> tuple[PipelineAction, ...]:
    """Return the computations of one rank of a table of torch. Idle places and reductions of gradients are left out."""
    kinds = {work.value: work for work in Work}
    out: list[PipelineAction] = []
    for entry in row:
        parts = [] if entry is None else list(entry.sub_actions or [entry])
        known = [p for p in parts if p.computation_type.value in kinds]
        for i, part in enumerate(known):
            work = kinds[part.computation_type.value]
            out.append(PipelineAction(work, part.stage_index, part.microbatch_index, len(known) - 1 - i))
    return tuple(out)
