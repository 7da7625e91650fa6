"""The proofs: nothing runs that has not passed here.

One call (`check`), over all ranks at once:

1. events and flags: every event has one recorder, every wait one signal, every word one writer (order.py);
2. no circle of waits, not even when one thread issues each list in order to one hardware queue (order.py);
3. no race, no read before its write, no cell stored twice (memory.py);
4. the result is the op's definition (values.py);
5. *join*: when a rank's last COMPUTE step runs, all its COPY steps have ended, so with that step everything it returns is
   written, nothing it was given is still read, and the caller may use, free or overwrite both;
6. *heard*: before that step, every peer's READY (of this epoch, with this site's tag) has been seen.

Several calls (`check_sequence`): 1 and 2 across calls, plus: an arena slot is touched again only after its last user is
done with it, and no flag word is written again before its waiter has seen it.

**Why pairs are enough.** Let call X use a slot in epoch e and Y be the next, in epoch e + 2. `check_reuse` proves X and Y
*without* the call between them, so that call may be anything, also one that ran on plain c10d. Any earlier user of the slot
is ordered too: by 5 and 6 nobody ends Y before everybody has begun Y, hence ended X. And no sequence blocks: run the calls
one after the other, each in list order; each ends (2), as it waits only for itself and for the past; waits stay satisfied
(no word is overwritten before it is seen), so every other interleaving ends as well. This holds for overlapping groups
that share a COPY queue, provided that ranks issue the calls they share in one order, as c10d demands too.

**Why a skipped call cannot go unseen.** By 6, a rank that ends a call has seen (epoch, tag) of every peer; a peer that skipped
one brings the tag of another site, which is an error at once, or nothing, which is a timeout. `check_skip` plays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from . import memory
from .builders import build_all, check_key
from .builders.schedule_writer import SLOTS
from .effects import show_flag, waits
from .happens_before import Call, HappensBefore, Node, Word
from .schedule_error import ScheduleError
from .skipped_calls import check_skip
from .steps import Key, Opaque, Queue, Schedule
from .symbolic_run import SymbolicRun

__all__ = ["ScheduleError", "check", "check_key_proof", "check_pair", "check_reuse", "check_sequence", "check_skip"]


def check(schedules: Sequence[Schedule]) -> None:
    """Prove one call of all ranks, or raise `ScheduleError`."""
    schedules = tuple(schedules)
    _check_group(schedules)
    order = HappensBefore([Call(schedules, tuple(range(len(schedules))), 1)], SLOTS)
    grid = memory.Grid(schedules)
    memory.check_call(order, grid)
    _check_ends(order)
    if not any(isinstance(node.step, Opaque) for node in order.nodes):  # what an Opaque computes is not declared
        SymbolicRun(order, grid).run()


def check_sequence(
    calls: Sequence[Sequence[Schedule]],
    slots: int = SLOTS,
    groups: Sequence[tuple[int, ...]] | None = None,
    epochs: Sequence[int] | None = None,
) -> None:
    """Prove calls that follow one another, or raise `ScheduleError`.

    `groups[i]`: the global ranks of call i (default: 0, 1, ...); ranks issue the calls they take part in in the order of
    the list. `epochs[i]`: its epoch on its group (default: counted from 1); gaps stand for calls that are not looked at.
    """
    every = [tuple(schedules) for schedules in calls]
    for schedules in {id(schedules): schedules for schedules in every}.values():
        # Comparing contents would cost more than it saves: only the very object that the builders cached is known.
        if schedules and schedules is build_all(schedules[0].key):
            check_key_proof(schedules[0].key)
        else:
            check(schedules)
    placed: list[Call] = []
    counts: dict[tuple[int, ...], int] = {}
    for i, schedules in enumerate(every):
        group = tuple(range(len(schedules))) if groups is None else groups[i]
        if len(group) != len(schedules) or len(set(group)) != len(group):
            raise ScheduleError("group", f"call {i} has {len(schedules)} schedules for the ranks {group}")
        counts[group] = counts.get(group, 0) + 1 if epochs is None else epochs[i]
        placed.append(Call(schedules, group, counts[group]))
    order = HappensBefore(placed, slots)
    memory.check_slots(order)
    _check_words(order)


@lru_cache(maxsize=1024)
def check_key_proof(key: Key) -> None:
    """`check` for what the builders make of `key`, once."""
    check_key(key)
    check(build_all(key))


@lru_cache(maxsize=4096)
def check_reuse(key_a: Key, key_b: Key) -> None:
    """Prove that B may use a slot after A and A after B, whatever comes between: enough for all sequences (see above).
    Keys of different group sizes never share a slot."""
    check_key_proof(key_a)
    check_key_proof(key_b)
    if key_a.ranks == key_b.ranks:
        a, b = build_all(key_a), build_all(key_b)
        check_sequence([a, b, a], epochs=[1, 1 + SLOTS, 1 + 2 * SLOTS])


def check_pair(key_a: Key, key_b: Key) -> None:
    """`check_reuse` and, as a check of its reasoning, whole sequences: on one group, and on two overlapping groups whose
    common ranks share a COPY queue."""
    check_reuse(key_a, key_a)
    check_reuse(key_a, key_b)
    check_reuse(key_b, key_b)
    a, b = build_all(key_a), build_all(key_b)
    if key_a.ranks == key_b.ranks:
        for calls in ([a, a, a, b], [a, b, a, b, a], [a, b, b, a, a, b], [b, b, b, a], [b, a, b, a, b]):
            check_sequence(calls)
    first = tuple(range(key_a.ranks))
    shared = key_a.ranks // 2
    for second in (tuple(reversed(range(key_b.ranks))), tuple(range(shared, shared + key_b.ranks))):
        if second != first:
            for pattern in ("abab", "abba", "aabb", "baab"):
                calls = [a if letter == "a" else b for letter in pattern]
                check_sequence(calls, groups=[first if letter == "a" else second for letter in pattern])


def _check_group(schedules: tuple[Schedule, ...]) -> None:
    if not schedules:
        raise ScheduleError("group", "no schedules: a call has one a rank")
    key = schedules[0].key
    if len(schedules) != key.ranks:
        raise ScheduleError("group", f"{len(schedules)} schedules for {key.ranks} ranks")
    for rank, schedule in enumerate(schedules):
        if schedule.rank != rank or schedule.key != key:
            raise ScheduleError("group", f"schedule {rank} is for rank {schedule.rank} of {schedule.key}, expected {key}")


def _check_ends(order: HappensBefore) -> None:
    """The join and heard rules, for the one call of `order`."""
    key = order.calls[0].schedules[0].key
    mine: list[list[Node]] = [[] for _ in range(key.ranks)]
    for node in order.nodes:
        mine[node.rank].append(node)
    for rank, nodes in enumerate(mine):
        end = order.ends[0][rank]
        if end is None:
            raise ScheduleError("join", f"rank {rank} has no COMPUTE step: nothing tells its caller when the call has ended")
        past = order.ended[end.id] | 1 << end.id
        heard = {rank}
        for node in nodes:
            if past >> node.id & 1:
                heard.update(wait.flag.source for wait in waits(node.step) if node.closes and wait.back == 0)
                continue
            if node.step.queue is Queue.COPY:  # COMPUTE steps have all ended: the end is the last of their queue
                raise ScheduleError("join", f"{order.where(node)} may still run when the call ends with {order.where(end)}")
        for peer in set(range(key.ranks)) - heard:
            raise ScheduleError(
                "heard", f"rank {rank} ends without having waited for rank {peer}, whose skipping would go unseen"
            )


def _check_words(order: HappensBefore) -> None:
    """No flag word is written again before every wait for its last value has ended."""
    epochs: dict[Word, list[int]] = {}
    for word, epoch in order.signalled:
        epochs.setdefault(word, []).append(epoch)
    for word, written in epochs.items():
        written.sort()
        for before, after in pairwise(written):
            again = order.signalled[word, after]
            for reader in (order.signalled[word, before], *order.awaited.get((word, before), [])):
                if not order.ended[again.id] >> reader.id & 1:
                    raise ScheduleError(
                        "flag overwritten",
                        f"{order.where(again)} may write {show_flag(word[2])} before {order.where(reader)} is done with it",
                    )
