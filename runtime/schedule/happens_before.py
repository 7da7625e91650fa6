"""The happens-before relation between the steps of all ranks.

A *node* is a step of one rank in one call. Node a happens before node b if a path of these edges leads from a to b:

* queue: steps of a queue run in issue order, also across calls (one COPY queue per process, shared by all its groups);
* event: a step begins after the events in `after`;
* flag: a wait ends after the signal it waits for;
* program: a call begins on a rank after the last COMPUTE step of that rank's previous call (there is no such edge between
  ranks). The ops of a split collective are such entries of the program, with others between them.

Issue order is deliberately not an edge. But it must *work* as one: one host thread issues the steps, and a device with a
single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) runs them in that order. So that order must not deadlock either.

An `Opaque` is two nodes: the first writes and then signals, the second waits and then reads. Its inside is not modeled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .effects import show, show_flag, signals, waits
from .schedule_error import ScheduleError
from .steps import FUSED_SLOTS, SPLIT_SLOTS, Flag, FlagKind, Opaque, Part, Queue, Schedule, Step


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one group: the schedules of its ranks, the group's global ranks, and its epoch on that group.

    `split_slot`: of a split collective. Its epoch counts the calls of that slot only. The epochs of fused collectives count
    those only.
    """

    schedules: tuple[Schedule, ...]
    group: tuple[int, ...]
    epoch: int
    split_slot: int | None = None

    def slot(self, slots: int, back: int = 0) -> int:
        """Return the slot of this call, or of the call `back` epochs before.

        Split slots are behind the `slots` others, and the slots of fused collectives behind those.
        """
        if self.is_fused:
            return slots + SPLIT_SLOTS + (self.epoch - back) % FUSED_SLOTS
        return (self.epoch - back) % slots if self.split_slot is None else slots + self.split_slot

    def slot_distance(self, slots: int) -> int:
        """Return the epochs from one use of the slot to the next."""
        if self.is_fused:
            return FUSED_SLOTS
        return slots if self.split_slot is None else 1

    @property
    def is_fused(self) -> bool:
        """The call is a fused collective."""
        return bool(self.schedules) and self.schedules[0].key.is_fused


@dataclass(slots=True, eq=False)
class Node:
    """A step of a rank in a call. `rank`: the rank in the call's group. `place`: the step's number in its schedule."""

    id: int
    call: int
    rank: int
    place: int
    step: Step
    opens: bool = True  # performs the step's writes and signals
    closes: bool = True  # performs the step's waits and reads
    before: list[int] = field(default_factory=list)


Word = tuple[tuple[int, ...], int, Flag]
"""A flag word: the group, the slot and the flag."""
Program = Sequence[tuple[int, Part]]
"""What every rank issues, in order: the number of a call, and all of it or one op of a split collective."""


class HappensBefore:
    """The nodes of some calls and their happens-before relation.

    `ended[n]`: the nodes that happen before node n, as a bit mask. `sequence`: one order in which all nodes can run.
    """

    def __init__(self, calls: Sequence[Call], slots: int, program: Program | None = None) -> None:
        self.calls = calls
        self.slots = slots
        self.program = [(number, Part.WHOLE) for number in range(len(calls))] if program is None else program
        self.nodes: list[Node] = []
        self.signalled: dict[tuple[Word, int], Node] = {}
        self.awaited: dict[tuple[Word, int], list[Node]] = {}
        self._lists: dict[int, list[Node]] = {}  # issue order by global rank
        self._add_calls()
        self._add_flags()
        self.sequence = self._run()
        self.ended: list[int] = [0] * len(self.nodes)
        for node in self.sequence:
            mask = 0
            for i in node.before:
                mask |= self.ended[i] | 1 << i
            self.ended[node.id] = mask

    def where(self, node: Node) -> str:
        """Describe a node: ``rank 1 step 7 (COPY: Copy INPUT@1[1] -> LANDING@0[1])``."""
        call = f"call {self.calls[node.call].epoch} " if len(self.calls) > 1 else ""
        return f"{call}rank {node.rank} step {node.place} ({node.step.queue.name}: {show(node.step)})"

    def word(self, call: Call, flag: Flag, back: int = 0) -> Word:
        """Return the word of `flag` in `call`, or in the call `back` epochs before."""
        return (call.group, call.slot(self.slots, back), flag)

    def first(self, mask: int) -> Node:
        """Return the first node of a non-empty bit mask."""
        return self.nodes[(mask & -mask).bit_length() - 1]

    def _add_calls(self) -> None:
        queue_tails: dict[tuple[int, Queue], int] = {}
        program: dict[int, int] = {}  # global rank -> last COMPUTE node of its previous entry
        all_events: dict[tuple[int, int], dict[int, int]] = {}  # by call and rank: all its ops share them
        for number, part in self.program:
            call = self.calls[number]
            for rank, schedule in enumerate(call.schedules):
                me = call.group[rank]
                starts_after = [program[me]] if me in program else []
                events = all_events.setdefault((number, rank), {})
                end: Node | None = None
                for place in schedule.places(part):
                    step = schedule.steps[place]
                    node = self._add_step(number, rank, place, step, queue_tails.get((me, step.queue)), starts_after)
                    for event in step.after:
                        if event not in events:
                            raise ScheduleError(
                                "event",
                                f"{self.where(node)} waits for event {event}, which no earlier step of its list records",
                            )
                        self.nodes[node.id if node.opens else node.id - 1].before.append(events[event])
                    if step.record is not None:
                        if step.record in events:
                            raise ScheduleError(
                                "event", f"{self.where(node)} records event {step.record}, which another step also records"
                            )
                        events[step.record] = node.id
                    queue_tails[me, step.queue] = node.id
                    if step.queue is Queue.COMPUTE:
                        end = node
                if end is not None:
                    program[me] = end.id

    def _add_step(self, call: int, rank: int, place: int, step: Step, tail: int | None, starts: list[int]) -> Node:
        """Add the node or nodes of a step and return the last one."""
        halves = ((True, False), (False, True)) if isinstance(step, Opaque) else ((True, True),)
        before = [*starts] if tail is None else [*starts, tail]
        for opens, closes in halves:
            node = Node(len(self.nodes), call, rank, place, step, opens, closes, before)
            self.nodes.append(node)
            self._lists.setdefault(self.calls[call].group[rank], []).append(node)
            before = [node.id]
        return self.nodes[-1]

    def _add_flags(self) -> None:
        for node in self.nodes:
            call = self.calls[node.call]
            for flag in signals(node.step) if node.opens else ():
                if flag.source != node.rank or not 0 <= flag.rank < len(call.group) or flag.rank == node.rank:
                    raise ScheduleError(
                        "flag", f"{self.where(node)} writes {show_flag(flag)}: a rank writes its own flags, and only to a peer"
                    )
                at = (self.word(call, flag), call.epoch)
                if at in self.signalled:
                    raise ScheduleError(
                        "flag", f"{show_flag(flag)} is signalled twice: {self.where(self.signalled[at])} and {self.where(node)}"
                    )
                self.signalled[at] = node
        for node in self.nodes:
            call = self.calls[node.call]
            for wait in waits(node.step) if node.closes else ():
                if wait.flag.rank != node.rank:
                    raise ScheduleError(
                        "flag", f"{self.where(node)} waits for {show_flag(wait.flag)}: a rank waits for words in its own memory"
                    )
                epoch = call.epoch - wait.back
                is_done = wait.flag.kind is FlagKind.DONE  # DONE waits compare no tag: they only order earlier calls
                distance = call.slot_distance(self.slots)
                if wait.back < 0 or wait.back % distance or (wait.back > 0) != is_done:
                    expected = f"a multiple of {distance}, an earlier call of its slot" if is_done else "0, its own epoch"
                    raise ScheduleError("flag", f"{self.where(node)} looks {wait.back} epochs back, expected {expected}")
                if epoch < 1:
                    continue  # before the group's first call: always satisfied
                at = (self.word(call, wait.flag, wait.back), epoch)
                self.awaited.setdefault(at, []).append(node)
                if at not in self.signalled:
                    raise ScheduleError("flag", f"{self.where(node)} waits for a signal that no step of epoch {epoch} sends")
                node.before.append(self.signalled[at].id)

    def _run(self) -> list[Node]:
        """Return one order in which all nodes can run, each rank's list strictly in issue order."""
        done, blocked = _run_lists(list(self._lists.values()), len(self.nodes))
        if not blocked:
            return done
        queues: dict[tuple[int, Queue], list[Node]] = {}
        for me, nodes in self._lists.items():
            for node in nodes:
                queues.setdefault((me, node.step.queue), []).append(node)
        _, deadlocked = _run_lists(list(queues.values()), len(self.nodes))
        if deadlocked:
            raise ScheduleError("circular wait", f"these steps wait for each other: {self._join(deadlocked)}")
        raise ScheduleError(
            "issue order",
            f"issued in list order by one thread, on one hardware queue, these steps never begin: {self._join(blocked)}",
        )

    def _join(self, nodes: Sequence[Node]) -> str:
        return "; ".join(self.where(node) for node in nodes[:8])


def _run_lists(lists: list[list[Node]], count: int) -> tuple[list[Node], list[Node]]:
    """Run every list in order, each node after its predecessors. Return the nodes that ran and those that cannot."""
    ran = bytearray(count)
    done: list[Node] = []
    heads = [0] * len(lists)
    progress = True
    while progress:
        progress = False
        for i, nodes in enumerate(lists):
            while heads[i] < len(nodes) and all(ran[before] for before in nodes[heads[i]].before):
                node = nodes[heads[i]]
                ran[node.id] = 1
                done.append(node)
                heads[i] += 1
                progress = True
    return done, [nodes[head] for nodes, head in zip(lists, heads, strict=True) if head < len(nodes)]
