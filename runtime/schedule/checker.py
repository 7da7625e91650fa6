"""Prove schedules. Executors run only schedules that passed here.

One call (`check`), over all ranks at once:

1. events and flags: every event has one recorder, every wait one signal, every word one writer (happens_before.py);
2. no circular wait, even when one thread issues each list in order to one hardware queue (happens_before.py);
3. no race, no read before its write, no cell stored twice (memory.py);
4. the result is the op's definition (symbolic_run.py);
5. *split*: the start of a split collective only copies its input. It waits for no flag of its own call, and runs no COMPUTE
   step but its Return. A release only signals;
6. *area*, *pairwise*: rounds of an all_to_all take turns, and its pieces are independent (all_to_all_rules.py);
7. *join*: when a rank's last COMPUTE step runs, all its COPY steps have ended. So after that step all results are written and
   no input is still read: the caller may use, free or overwrite both. In a zero-copy gather that step is the last of finish;
8. *heard*: before that step, every peer's READY (of this epoch, with this site's tag) has been seen.

Several calls (`check_sequence`): 1 and 2 across calls, whole or as start and finish with other calls between. Also, a call
accesses an arena slot only after the previous call of the slot is done with it, and no flag word is overwritten before its
waiter has seen it.

A key (`check_key_proof`): `check`, and, but for fused collectives, *released*: a rank signals READY to a peer only after it has
seen the slot's earlier DONE of that peer, or READY of this call, which the peer signals after its DONE. And it signals DONE to
a peer only after its waits for that peer's READY have ended. So an executor may clear a peer's READY words before it signals
DONE to that peer. The CUDA executor does. An all_to_all is proven with several numbers of rounds.

**Why pairs are enough.** Let call X use a slot in epoch e, and let Y be the next user, in epoch e + SLOTS. `check_reuse`
proves X and Y *without* the calls between them. So those may be any calls, even on plain c10d. Any earlier user of the slot
is ordered too: by 7 and 8, a rank ends Y only after all ranks have begun Y, hence ended X. No sequence blocks either. Run the
calls one after the other, each in list order. Each ends (2), as it waits only for itself and for earlier calls. Waits stay
satisfied (no word is overwritten before it is seen), so every other interleaving ends as well. This holds for overlapping
groups that share a COPY queue, if ranks issue the calls they share in one order, as c10d requires too.

**Split collectives.** A split slot has memory, words and epochs of its own. So a call between start and finish races with
neither, and pairs of calls of one slot are enough as above. No interleaving blocks. Run the starts, finishes, releases and
whole calls one after the other. A start ends (5): it waits only for DONE of the slot's previous finish or release. A finish
ends (2): it waits only for its own start and itself. A release waits for nothing (5). `check_interleaved` tests that.

The result of a zero-copy gather is read until its release, which begins with a `Release` step that reads all of it. So the
rules of memory order every push of the next call behind that step.

**Channels** (`check_channel`). The calls of a channel are the pieces of its messages. Its source runs ahead of its
destination, by at most its slots. So the join and heard rules do not apply: a message has two ends, which complete apart.
Proven are 1 and 2 over all pieces of three turns of the slots, no reuse of a slot or a word that is needed, and arrival.
Steps depend on pieces only by their distance, so three turns stand for any number. Channels share no memory, no word and no
queue, so any number of them behaves as each does alone.

**Fused collectives.** They have slots and epochs of their own, and no DONE. Let calls X, Z, Y follow each other, so that Y uses
the slot of X. A rank writes it at a peer after its Z has ended, hence after it has seen READY of that peer's Z (8). The peer
has signalled that after its X had ended, as all steps are on COMPUTE. That holds for any Z; `check_reuse` tests every three in
a row of a pair. Calls of other kinds between them are of no account.

**Why a skipped call is always noticed.** By 8, a rank that ends a call has seen (epoch, tag) of every peer. A peer that
skipped a call sends the tag of another site, which is an immediate error, or nothing, which is a timeout. `check_skip` tests
this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from . import memory
from .all_to_all_rules import ROUNDS, check_areas, check_pairwise, check_repeats, check_rounds
from .builders import build_all, check_key
from .effects import signals, waits
from .happens_before import Call, HappensBefore, Node, Program
from .schedule_error import ScheduleError
from .skipped_calls import check_skip
from .split_rules import check_split
from .steps import SLOTS, Buf, Copy, Flag, FlagKind, Key, Opaque, Part, Queue, Region, Schedule
from .symbolic_run import SymbolicRun

__all__ = [
    "ScheduleError",
    "check",
    "check_channel",
    "check_interleaved",
    "check_key_proof",
    "check_pair",
    "check_released",
    "check_reuse",
    "check_sequence",
    "check_skip",
]


def check(schedules: Sequence[Schedule]) -> None:
    """Prove one call of all ranks, or raise ScheduleError."""
    schedules = tuple(schedules)
    _check_group(schedules)
    check_split(schedules)
    check_rounds(schedules)
    order = _single_call(schedules)
    grid = memory.Grid(schedules)
    memory.check_call(order, grid)
    if schedules[0].key.is_all_to_all:
        check_areas(order)
        check_pairwise(schedules)
    _check_ends(order)
    if not any(isinstance(node.step, Opaque) for node in order.nodes):  # an Opaque does not declare its computation
        SymbolicRun(order, grid).run()


def check_sequence(
    calls: Sequence[Sequence[Schedule]],
    slots: int = SLOTS,
    groups: Sequence[tuple[int, ...]] | None = None,
    epochs: Sequence[int] | None = None,
    split_slots: Sequence[int] | None = None,
    program: Program | None = None,
) -> None:
    """Prove consecutive calls, or raise ScheduleError.

    `groups[i]`: the global ranks of call i (default: 0, 1, ...). Ranks issue their calls in list order.
    `epochs[i]`: its epoch on its group or split slot (default: counted from 1). Gaps stand for calls that are not examined.
    `split_slots[i]`: its split slot (default: 0), not read for other calls.
    `program`: the order in which ranks issue calls and ops of split collectives (default: one whole call after the other).
    """
    all_calls = [tuple(schedules) for schedules in calls]
    for schedules in {id(schedules): schedules for schedules in all_calls}.values():
        # By identity, with the object that the builders cached: comparing contents would cost more than it saves.
        if schedules and schedules is build_all(schedules[0].key):
            check_key_proof(schedules[0].key)
        else:
            check(schedules)
    placed: list[Call] = []
    counts: dict[tuple[tuple[int, ...], int | str | None], int] = {}
    for i, schedules in enumerate(all_calls):
        group = tuple(range(len(schedules))) if groups is None else groups[i]
        if len(group) != len(schedules) or len(set(group)) != len(group):
            raise ScheduleError("group", f"call {i} has {len(schedules)} schedules for the ranks {group}")
        split_slot = None
        if schedules and schedules[0].key.is_split:
            split_slot = 0 if split_slots is None else split_slots[i]
        is_fused = bool(schedules) and schedules[0].key.is_fused
        counter = (group, "fused" if is_fused else split_slot)
        counts[counter] = counts.get(counter, 0) + 1 if epochs is None else epochs[i]
        placed.append(Call(schedules, group, counts[counter], split_slot))
    order = HappensBefore(placed, slots, program)
    memory.check_slots(order)
    memory.check_words(order)


@lru_cache(maxsize=1024)
def check_key_proof(key: Key) -> None:
    """Run `check` and `check_released` on the built schedules of `key`, once; of an all_to_all, with several rounds."""
    check_key(key)
    for rounds in ROUNDS if key.is_all_to_all else ():
        _check_built(replace(key, chunks=rounds))
    _check_built(key)


@lru_cache(maxsize=1024)
def _check_built(key: Key) -> None:
    schedules = build_all(key)
    check(schedules)
    check_repeats(schedules)
    if not key.is_fused:
        check_released(schedules)


@lru_cache(maxsize=4096)
def check_reuse(key_a: Key, key_b: Key) -> None:
    """Prove that B may use a slot after A and A after B, with any calls between: enough for all sequences (see above).

    Keys of different group sizes never share a slot.
    """
    if key_a.is_channel or key_b.is_channel:
        return  # a channel shares its slots with no other call
    check_key_proof(key_a)
    check_key_proof(key_b)
    if key_a.ranks == key_b.ranks:
        a, b = build_all(key_a), build_all(key_b)
        if key_a.is_fused != key_b.is_fused:
            return  # they never share a slot
        if key_a.is_fused:
            check_sequence([a, a, a, b, a, b, b, b, a, a])  # every three in a row
            return
        distance = key_a.slot_distance
        if distance != key_b.slot_distance:
            return  # a split collective and another call never share a slot
        check_sequence([a, b, a], epochs=[1, 1 + distance, 1 + 2 * distance])


@lru_cache(maxsize=4096)
def check_interleaved(key_a: Key, key_b: Key) -> None:
    """Prove calls of both keys between start and finish of each other, in two split slots and twice in the same slots."""
    if key_a.ranks != key_b.ranks or not (key_a.is_split or key_b.is_split):
        return
    if key_a.is_channel or key_b.is_channel:
        return  # a channel shares its slots with no other call
    keys = [key_a, key_b, key_a, key_b]

    def issue(numbers: Sequence[int], place: int) -> list[tuple[int, Part]]:
        return [(i, keys[i].parts[place]) for i in numbers if place < len(keys[i].parts)]

    nested = [*issue((0, 1), 0), *issue((1, 0), 1), *issue((0, 1), 2)]
    nested += [*issue((2, 3), 0), *issue((2, 3), 1), *issue((2, 3), 2)]
    check_sequence([build_all(key) for key in keys], split_slots=[0, 1, 0, 1], program=nested)


def check_channel(schedules: Sequence[Schedule]) -> None:
    """Prove the schedules of both ends of a channel, or raise ScheduleError."""
    schedules = tuple(schedules)
    _check_group(schedules)
    slots = schedules[0].key.chunks
    order = HappensBefore([Call(schedules, (0, 1), 1)], slots)
    memory.check_call(order, memory.Grid(schedules))
    moved = [(step.src.buf, step.dst) for schedule in schedules for step in schedule.steps if isinstance(step, Copy)]
    landing, output = Region(Buf.LANDING, 1, 0), Region(Buf.OUTPUT, 1, 0)
    if moved != [(Buf.INPUT, landing), (Buf.LANDING, output)]:
        raise ScheduleError("delivered", "a piece goes from INPUT of rank 0 to LANDING of rank 1, and from there to OUTPUT")
    pieces = HappensBefore([Call(schedules, (0, 1), number) for number in range(1, 3 * slots + 2)], slots)
    memory.check_slots(pieces)
    memory.check_words(pieces)


def check_pair(key_a: Key, key_b: Key) -> None:
    """Run `check_reuse`, and test its reasoning on full sequences.

    The sequences run on one group, and on two overlapping groups whose common ranks share a COPY queue.
    """
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


def _single_call(schedules: tuple[Schedule, ...]) -> HappensBefore:
    """Return the order of the steps of one call, the first of its slot."""
    split_slot = 0 if schedules[0].key.is_split else None
    return HappensBefore([Call(schedules, tuple(range(len(schedules))), 1, split_slot)], SLOTS)


def _check_group(schedules: tuple[Schedule, ...]) -> None:
    if not schedules:
        raise ScheduleError("group", "no schedules: a call has one per rank")
    key = schedules[0].key
    if len(schedules) != key.ranks:
        raise ScheduleError("group", f"{len(schedules)} schedules for {key.ranks} ranks")
    for rank, schedule in enumerate(schedules):
        # A rank that cannot store at the owners runs the same call without (csrc/bindings/ops/reduction.cpp).
        if schedule.rank != rank or replace(schedule.key, direct=key.direct) != key:
            raise ScheduleError("group", f"schedule {rank} is for rank {schedule.rank} of {schedule.key}, expected {key}")


def _check_ends(order: HappensBefore) -> None:
    """Check the join and heard rules for the one call of `order`."""
    key = order.calls[0].schedules[0].key
    by_rank: list[list[Node]] = [[] for _ in range(key.ranks)]
    for node in order.nodes:
        by_rank[node.rank].append(node)
    for rank, nodes in enumerate(by_rank):
        end = _find_end(order, nodes)
        if end is None:
            raise ScheduleError("join", f"rank {rank} has no COMPUTE step: its caller cannot tell when the call has ended")
        past = order.ended[end.id] | 1 << end.id
        heard = {rank}
        for node in nodes:
            if past >> node.id & 1:
                heard.update(wait.flag.source for wait in waits(node.step) if node.closes and wait.back == 0)
                continue
            if node.step.queue is Queue.COPY:  # COMPUTE steps have ended, but for those of a release
                raise ScheduleError("join", f"{order.where(node)} may still run when the call ends with {order.where(end)}")
        for peer in set(range(key.ranks)) - heard:
            raise ScheduleError(
                "heard", f"rank {rank} ends without having waited for rank {peer}: a call skipped there would not be noticed"
            )


def _find_end(order: HappensBefore, nodes: Sequence[Node]) -> Node | None:
    """Return the node of a rank after which its caller uses the results: its last on COMPUTE, a release apart."""
    schedule = order.calls[0].schedules[nodes[0].rank] if nodes else None
    released = schedule.places(Part.RELEASE) if schedule is not None and schedule.key.zero_copy else range(0)
    return next((n for n in reversed(nodes) if n.step.queue is Queue.COMPUTE and n.place not in released), None)


def check_released(schedules: Sequence[Schedule]) -> None:
    """Check the released rule for one call of all ranks."""
    order = _single_call(tuple(schedules))
    signalled: dict[tuple[int, int], Node] = {}  # (rank, peer) -> the node of `rank` that signals DONE to `peer`
    released: dict[tuple[int, int], int] = {}  # (rank, peer) -> nodes of `rank` after which the peer has released the slot
    for node in order.nodes:
        for flag in _signals_of(node):
            if flag.kind is FlagKind.DONE:
                signalled[node.rank, flag.rank] = node
        for flag in _waits_of(node):
            if flag.kind in (FlagKind.DONE, FlagKind.READY):
                released[node.rank, flag.source] = released.get((node.rank, flag.source), 0) | 1 << node.id
    for node in order.nodes:
        for flag in _signals_of(node):
            if flag.kind is not FlagKind.DONE and not order.ended[node.id] & released.get((node.rank, flag.rank), 0):
                raise ScheduleError("released", f"{order.where(node)} does not follow a wait for DONE of rank {flag.rank}")
        for flag in _waits_of(node):
            done = signalled.get((node.rank, flag.source))
            if flag.kind is not FlagKind.DONE and (done is None or not order.ended[done.id] >> node.id & 1):
                raise ScheduleError(
                    "released", f"rank {node.rank} may signal DONE to rank {flag.source} before {order.where(node)}"
                )


def _signals_of(node: Node) -> tuple[Flag, ...]:
    return signals(node.step) if node.opens else ()


def _waits_of(node: Node) -> tuple[Flag, ...]:
    return tuple(wait.flag for wait in waits(node.step)) if node.closes else ()
