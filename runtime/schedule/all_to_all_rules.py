"""The rules for an all_to_all: rounds take turns in an area, and no piece needs the steps of another.

1. *area*: all rounds of a piece land in the same area, and use the same two flag words, READY and READY2. So a push to the area
   follows all reads of the round before, and a word is written only after the wait for its last round has ended. That wait
   clears the word (executors), so rounds need no number in it.
2. *pairwise*: a step is of one piece, or a marker. The steps of a piece alone, without those of all others, obey the rules of
   memory and words over several calls.

Why that is enough for pieces with any number of rounds. Let a call have fewer rounds for some pieces. Its steps are those of a
proven schedule less some pushes, waits and copies of these pieces, on both ranks.

- No circular wait: the order in which the steps of the full schedule can run is one for the rest. Their waits are for steps of
  their own piece and an earlier round, which are not left out.
- No race: conflicting accesses are of one piece (2), whose own steps order them (2). More steps only add order.
- Joins and DONEs are at the ends of the queues, behind all pieces, and stay.

With `one_area` all sources land in the same place. In a call only one of them has rows. Those of different calls are ordered by
the slot rule, which is over all of a slot: a push waits for the receiver's DONE of the call before, behind all its copies.

Rounds depend on each other only by their distance, one, and have equal steps (`check_repeats`). So three stand for any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from . import memory
from .effects import accesses, show, signals, waits
from .happens_before import Call, HappensBefore, Node
from .schedule_error import ScheduleError
from .steps import ONE, SLOTS, ZERO, Buf, Copy, Flag, FlagKind, Part, Queue, Region, Return, Round, Schedule, Signal, Step, Wait

ROUNDS = (1, 2, 3)
"""Numbers of rounds with which a key is proven."""
_CALLS = 3
Piece = tuple[int, int]
"""Source and destination."""


def check_rounds(schedules: Sequence[Schedule]) -> None:
    """Check that `Round` steps separate the rounds of an all_to_all, and that other schedules have none."""
    for schedule in schedules:
        number, last = 0, sum(isinstance(step, Round) for step in schedule.steps)
        finish = schedule.places(Part.FINISH) if schedule.key.is_split else range(0)
        for place, step in enumerate(schedule.steps):
            where = f"rank {schedule.rank} step {place} ({step.queue.name}: {show(step)})"
            if isinstance(step, Round):
                number += 1
                if not schedule.key.is_all_to_all or place not in finish or step.queue is not Queue.COMPUTE or last == 1:
                    raise ScheduleError("round", f"{where}: the finish of an all_to_all has Rounds in pairs, on COMPUTE")
            elif schedule.key.is_all_to_all and _round_of(step) not in (number % max(1, last), None):
                raise ScheduleError("round", f"{where} is behind {number} of {last} Rounds, but of round {_round_of(step)}")


def _round_of(step: Step) -> int | None:
    """Return the round of a step; None for steps that are not of one round: DONEs, which end a call, and markers."""
    match step:
        case Copy(src=src, dst=dst):
            return max(src.index, dst.index)
        case Signal(flag=flag) | Wait(flag=flag) if flag.kind is not FlagKind.DONE:
            return flag.index
    return None


def check_repeats(schedules: Sequence[Schedule]) -> None:
    """Check that the further rounds of each rank differ in their numbers only, so that executors may repeat one."""
    for schedule in schedules:
        cuts = [place for place, step in enumerate(schedule.steps) if isinstance(step, Round)]
        bodies = [[_without_round(step) for step in schedule.steps[a + 1 : b]] for a, b in pairwise(cuts)]
        if any(body != bodies[0] for body in bodies):
            raise ScheduleError("round", f"rank {schedule.rank}: further rounds differ, in {schedule.key}")


def _without_round(step: Step) -> Step:
    step = replace(step, record=None)
    match step:
        case Copy(src=src, dst=dst):
            return replace(step, src=replace(src, lo=ZERO, hi=ONE, index=0), dst=replace(dst, lo=ZERO, hi=ONE, index=0))
        case Signal() | Wait():
            return replace(step, flag=replace(step.flag, index=0))
    return step


def check_areas(order: HappensBefore) -> None:
    """Check the area rule for the one call of `order`."""
    written: dict[tuple[int, int], dict[int, list[Node]]] = {}  # (owner, source) -> round -> nodes
    accessed: dict[tuple[int, int], dict[int, list[Node]]] = {}
    signalled: dict[Flag, dict[int, Node]] = {}  # by the word -> round -> node
    awaited: dict[Flag, dict[int, list[Node]]] = {}
    for node in order.nodes:
        for access in accesses(node.step, node.rank):
            region = access.region
            if region.buf is Buf.LANDING:
                for uses in (accessed, written) if access.write else (accessed,):
                    uses.setdefault((region.rank, region.shard), {}).setdefault(region.index, []).append(node)
        for flag in signals(node.step):
            signalled.setdefault(replace(flag, index=0), {})[flag.index] = node
        for wait in waits(node.step):
            if wait.back == 0:
                awaited.setdefault(replace(wait.flag, index=0), {}).setdefault(wait.flag.index, []).append(node)
    for area, rounds in written.items():
        _check_turns(order, rounds, accessed[area], f"the area of rank {area[1]} at rank {area[0]}")
    for word, nodes in signalled.items():
        seen, what = awaited.get(word, {}), f"{word.kind.name} of rank {word.source} at rank {word.rank}"
        if word.kind is not FlagKind.DONE and any(len(seen.get(number, [])) != 1 for number in nodes):
            raise ScheduleError("area", f"{what} has not one wait for each signal")
        _check_turns(order, {number: [node] for number, node in nodes.items()}, seen, what)


def _check_turns(order: HappensBefore, later: dict[int, list[Node]], earlier: dict[int, list[Node]], what: str) -> None:
    for number, nodes in later.items():
        for node in nodes:
            for other in (o for before, found in earlier.items() if before < number for o in found):
                if not order.ended[node.id] >> other.id & 1:
                    raise ScheduleError("area", f"nothing orders {order.where(other)} and {order.where(node)} on {what}")


def check_pairwise(schedules: Sequence[Schedule]) -> None:
    """Check the pairwise rule."""
    ranks = len(schedules)
    found: dict[Piece, list[tuple[int, Step]]] = {}
    for schedule in schedules:
        for step in schedule.steps:
            if isinstance(step, (Return, Round)):
                continue
            piece = _piece_of(step)
            if schedule.rank not in piece or not all(0 <= rank < ranks for rank in piece):
                raise ScheduleError("pairwise", f"rank {schedule.rank} has a step of the piece {piece}: {show(step)}")
            found.setdefault(piece, []).append((schedule.rank, step))
    for (source, destination), steps in found.items():
        if source != destination:
            _check_piece(schedules, source, destination, steps)


def _check_piece(schedules: Sequence[Schedule], source: int, destination: int, steps: list[tuple[int, Step]]) -> None:
    """Prove the steps of one piece. The source becomes rank 0, the destination rank 1."""
    ends = {source: 0, destination: 1}

    def of_end(rank: int) -> Schedule:
        return Schedule(schedules[rank].key, ends[rank], tuple(_rename(step, ends) for of, step in steps if of == rank))

    pair = (of_end(source), of_end(destination))
    _prove_alone(pair)


@lru_cache(maxsize=64)
def _prove_alone(pair: tuple[Schedule, Schedule]) -> None:
    """Prove the steps of a piece over several calls. Most pieces have the same steps, apart from their ranks."""
    memory.check_call(HappensBefore([Call(pair, (0, 1), 1, 0)], SLOTS), memory.Grid(pair))
    calls = HappensBefore([Call(pair, (0, 1), number, 0) for number in range(1, _CALLS + 1)], SLOTS)
    memory.check_slots(calls)
    memory.check_words(calls)


def _piece_of(step: Step) -> Piece:
    """Return the piece that a step belongs to."""
    match step:
        case Copy(src=src) if src.buf is Buf.INPUT:
            return src.rank, src.shard
        case Copy(src=src):
            return src.shard, src.rank
        case Signal(flag=flag) | Wait(flag=flag):
            return (flag.source, flag.rank) if flag.kind is FlagKind.READY else (flag.rank, flag.source)
    raise ScheduleError("pairwise", f"an all_to_all has no such step: {show(step)}")


def _rename(step: Step, ends: dict[int, int]) -> Step:
    """Return the step with its ranks renamed, and without events: these order steps of different pieces."""

    def region(old: Region) -> Region:
        return replace(old, rank=ends.get(old.rank, -1), shard=ends.get(old.shard, -1))

    step = replace(step, after=(), record=None)
    match step:
        case Copy():
            return replace(step, src=region(step.src), dst=region(step.dst))
        case Signal() | Wait():
            flag = replace(step.flag, rank=ends.get(step.flag.rank, -1), source=ends.get(step.flag.source, -1))
            return replace(step, flag=flag)
    return step
