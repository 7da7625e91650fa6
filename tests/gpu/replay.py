"""Check recorded step times of a call against the rules that its schedules were proven with.

    replay(schedules, records, one_clock)     # schedules and records of all ranks; raises Violation

A record is (step, queue, kind, begin_ns, end_ns, bytes), as `last_trace` returns it. The times must agree with every
happens-before edge of the proof: the order of steps on a queue, events and flags. Two steps that access the same piece of
memory, at least one writing, may not overlap. CLOCK_MONOTONIC is one clock for all ranks of a host. Each GPU has its own
clock (%globaltimer). Clock offsets must then exist that satisfy every rule between ranks. A cycle of rules that runs
backwards in time excludes such offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ub_overlap.runtime.schedule.effects import accesses
from ub_overlap.runtime.schedule.happens_before import Call, HappensBefore, Node
from ub_overlap.runtime.schedule.steps import SLOTS, Compute, Copy, Finish, Reduce, Region, Schedule, Signal, Wait

Record = tuple[int, str, str, int, int, int]


class Violation(AssertionError):
    """Recorded times that contradict the proof. The text lists the first few."""


@dataclass(frozen=True)
class Replayed:
    """Number of checked edges and access pairs, and the offset added to each rank's clock, in ns."""

    edges: int
    pairs: int
    offsets_ns: tuple[int, ...]


@dataclass(frozen=True)
class _Rule:
    """The rule that `late` - `early` is not negative, each on the clock of its rank."""

    early_rank: int
    early: int
    late_rank: int
    late: int
    text: str

    def margin(self, offsets: Sequence[int]) -> int:
        return self.late + offsets[self.late_rank] - self.early - offsets[self.early_rank]


def replay(
    schedules: Sequence[Schedule], records: Sequence[Sequence[Record]], one_clock: bool, grain_ns: int = 2_000
) -> Replayed:
    """Check all rules. `one_clock`: all ranks read the same clock. `grain_ns`: its resolution."""
    order = HappensBefore([Call(tuple(schedules), tuple(range(len(schedules))), 1)], SLOTS)
    times = {(rank, r[0]): r for rank, of in enumerate(records) for r in of}
    bad: list[str] = []
    _check_complete(schedules, records, bad)
    if bad:
        raise Violation("; ".join(bad[:5]))

    def span(node: Node) -> tuple[int, int]:
        record = times[node.rank, node.place]
        return record[3], record[4]

    def free(node: Node) -> bool:
        """Return whether it is a wait for an earlier epoch. An executor may run it anywhere before the pushes that need it."""
        return isinstance(node.step, Wait) and node.step.back != 0

    rules: list[_Rule] = []

    def rule(early: Node, at: int, late: Node, until: int, what: str) -> None:
        rules.append(_Rule(early.rank, at, late.rank, until, f"{order.where(late)} {what} {order.where(early)}"))

    for node in order.nodes:
        for before in (order.nodes[i] for i in node.before):
            if free(node) and before.rank == node.rank:
                continue
            begin, end = span(node)
            their_begin, their_end = span(before)
            if before.rank != node.rank:
                rule(before, their_begin, node, end, "ended before the signal it waits for was begun:")
            elif isinstance(node.step, Signal) and isinstance(before.step, Signal):
                rule(before, their_begin, node, begin, "(one launch may be both) began before")
            elif isinstance(node.step, Wait) and isinstance(before.step, Wait):
                rule(before, their_end, node, end, "(one launch may be both) ended before")
            else:
                rule(before, their_end, node, begin, "began before the end of")
    edges = len(rules)
    for a, b in _conflicts(order):
        early, late = (a, b) if order.ended[b.id] >> a.id & 1 else (b, a)
        rule(early, span(early)[1], late, span(late)[0], "touched memory before the end of")
    offsets = [0] * len(schedules) if one_clock else _offsets(rules, len(schedules), grain_ns)
    bad += [f"{r.text}, by {-r.margin(offsets)} ns" for r in rules if r.margin(offsets) < -grain_ns]
    if bad:
        raise Violation(f"{len(bad)} violations: " + "; ".join(bad[:5]))
    return Replayed(edges, len(rules) - edges, tuple(offsets))


def _offsets(rules: Sequence[_Rule], ranks: int, grain_ns: int) -> list[int]:
    """Return clock offsets by rank that satisfy the rules between ranks, if any exist."""
    between = [r for r in rules if r.early_rank != r.late_rank]
    offsets = [0] * ranks
    for _ in range(ranks + 1):  # Bellman-Ford: each rule bounds the offset of its earlier rank from above
        changed = False
        for r in between:
            if (short := -(r.margin(offsets) + grain_ns)) > 0:
                offsets[r.early_rank] -= short
                changed = True
        if not changed:
            break
    return offsets


def _check_complete(schedules: Sequence[Schedule], records: Sequence[Sequence[Record]], bad: list[str]) -> None:
    kinds = {Copy: "copy", Signal: "signal", Wait: "wait", Compute: "matmul", Reduce: "reduce", Finish: "finish"}
    if len(schedules) != len(records):
        bad.append(f"{len(records)} ranks recorded, {len(schedules)} schedules")
        return
    for schedule, of in zip(schedules, records, strict=True):
        found = {r[0]: r for r in of}
        if sorted(found) != list(range(len(schedule.steps))) or len(found) != len(of):
            bad.append(f"rank {schedule.rank} recorded {len(of)} steps of {len(schedule.steps)}")
            continue
        for place, step in enumerate(schedule.steps):
            _, queue, kind, begin, end, _ = found[place]
            if queue != step.queue.name or kind != kinds[type(step)]:
                bad.append(f"rank {schedule.rank} step {place} is a {kind} on {queue}, expected {step}")
            if not 0 < begin <= end:
                bad.append(f"rank {schedule.rank} step {place} ({kind}) has no times: {begin} to {end}")


def _conflicts(order: HappensBefore) -> list[tuple[Node, Node]]:
    """Return pairs of steps on two queues or ranks that access the same piece of a buffer, at least one writing."""
    touched: dict[tuple[int, int, int, int], list[tuple[Node, Region, bool]]] = {}
    for node in order.nodes:
        for access in accesses(node.step, node.rank):
            r = access.region
            touched.setdefault((r.buf, r.rank, r.shard, r.index), []).append((node, r, access.write))
    found = []
    for of in touched.values():
        for (a, x, writes_a), (b, y, writes_b) in combinations(of, 2):
            apart = a.rank != b.rank or a.step.queue is not b.step.queue
            if (writes_a or writes_b) and apart and max(x.lo, y.lo) < min(x.hi, y.hi):
                found.append((a, b))
    return found
