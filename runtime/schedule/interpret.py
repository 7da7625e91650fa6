"""The reference executor: run all ranks' schedules on symbolic rows, under a random interleaving.

It shares only the step classes with the checker, so that each tests the other. An accepted schedule must give the right
rows under every interleaving; one that gives wrong rows must be rejected. It is also the shortest definition of an executor.

Every rank has two threads, one per queue. They advance one *row* at a time, so that torn copies show. A tick runs the ready
thread with the highest priority. Priorities are random and sometimes redrawn, which finds rare orders (a very late rank) more
often than a uniform choice. Arena slots are flat lists that ops of every kind and size share. Inputs and partials become
`FREED` when their call ends. Flag words hold (epoch, tag), as in the real arena.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .effects import show, waits
from .happens_before import Program
from .op_contract import EMPTY, expected_rows, extent, product_shard
from .steps import (
    FUSED_SLOTS,
    SLOTS,
    Buf,
    Compute,
    Copy,
    Finish,
    Flag,
    Key,
    Part,
    Queue,
    Reduce,
    Region,
    Release,
    Return,
    Round,
    Schedule,
    Signal,
    Step,
    Wait,
)

FREED = "freed"


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """One call: the schedules of its ranks, the global ranks of its group, its site's tag, the rows of every shard, and the
    slot of a split collective. An all_to_all has the rows of every piece, those of source 0 first."""

    schedules: tuple[Schedule, ...]
    group: tuple[int, ...]
    tag: int
    rows: tuple[int, ...]
    split_slot: int = 0

    @property
    def key(self) -> Key:
        return self.schedules[0].key


@dataclass(slots=True)
class RunOutcome:
    """The result of a run; ranks are global. `wrong`: calls that ended with wrong rows."""

    ended: list[tuple[int, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """No call is wrong, mismatched or blocked."""
        return not (self.wrong or self.mismatched or self.blocked)


class TagMismatch(Exception):
    """A READY word holds this epoch with another site's tag, or a later epoch."""


@dataclass(slots=True)
class _RankCall:
    """One call in flight on one rank."""

    site: SimulatedCall
    number: int
    rank: int
    epoch: int
    slot: Any
    events: set[int] = field(default_factory=set)
    memory: dict[tuple[Buf, int, int, int], Any] = field(default_factory=dict)  # user tensors: buf, index, shard, row


@dataclass(slots=True)
class _Entry:
    """One entry of a rank's program: a call, or one op of a split collective. `returns`: its end returns the results."""

    run: _RankCall
    queues: dict[Queue, list[Step]]
    returns: bool


class Machine:
    """All ranks, their arenas and their threads. `skip`: (call number, global rank) pairs that skip the call.

    `programs`: by global rank, the order of calls and ops of split collectives (default: whole calls in list order).
    """

    def __init__(
        self,
        sites: Sequence[SimulatedCall],
        seed: int,
        slots: int = SLOTS,
        skip: Sequence[tuple[int, int]] = (),
        programs: Mapping[int, Program] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.slots = slots
        self.outcome = RunOutcome()
        self.words: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.arenas: dict[tuple[Any, ...], list[Any]] = {}
        self.programs: dict[int, list[_Entry]] = {}
        for me in sorted({me for site in sites for me in site.group}):
            mine = [(number, part) for number, site in enumerate(sites) if me in site.group for part in site.key.parts]
            self.programs[me] = self._entries(sites, me, mine if programs is None else programs[me], skip)
        self.at = {(me, queue): [0, 0] for me in self.programs for queue in Queue}  # call and step of each thread
        self.active: dict[tuple[int, Queue], Iterator[None]] = {}
        self.halted: set[int] = set()

    def _entries(
        self, sites: Sequence[SimulatedCall], me: int, program: Program, skip: Sequence[tuple[int, int]]
    ) -> list[_Entry]:
        """Return the entries of one rank. A skipped call has no epoch."""
        entries: list[_Entry] = []
        runs: dict[int, _RankCall] = {}
        epochs: dict[tuple[Any, ...], int] = {}
        for number, part in program:
            site = sites[number]
            if (number, me) in skip:
                continue
            schedule = site.schedules[site.group.index(me)]
            if number not in runs:
                fused = ("fused",) if site.key.is_fused else None
                counter = (site.group, ("split", site.split_slot) if site.key.is_split else fused)
                epoch = epochs[counter] = epochs.get(counter, 0) + 1
                slot = (*fused, epoch % FUSED_SLOTS) if fused else counter[1] or epoch % self.slots
                runs[number] = _RankCall(site, number, schedule.rank, epoch, slot)
            steps = [schedule.steps[place] for place in schedule.places(part)]
            queues = {queue: [step for step in steps if step.queue is queue] for queue in Queue}
            entries.append(_Entry(runs[number], queues, part in (Part.WHOLE, Part.FINISH)))
        return entries

    def run(self) -> RunOutcome:
        """Run until no thread can advance."""
        threads = list(self.at)
        self.random.shuffle(threads)
        while True:
            for thread in threads:
                if thread[0] not in self.halted and self._tick(*thread):
                    break
            else:
                break
            if self.random.random() < 0.1:
                threads.insert(self.random.randrange(len(threads)), threads.pop(self.random.randrange(len(threads))))
        for me, program in self.programs.items():
            number, place = self.at[me, Queue.COMPUTE]
            if number < len(program) and me not in self.halted:
                entry = program[number]
                self.outcome.blocked.append(f"rank {me} call {entry.run.number}: {show(entry.queues[Queue.COMPUTE][place])}")
        return self.outcome

    def _tick(self, me: int, queue: Queue) -> bool:
        """Advance a thread by one row or one step. Return False if it has to wait."""
        thread = (me, queue)
        self._skip_ended_calls(me, queue)
        number, place = self.at[thread]
        if number >= len(self.programs[me]) or number > self.at[me, Queue.COMPUTE][0]:
            return False  # a call begins once the rank's previous call has ended
        entry = self.programs[me][number]
        run, step = entry.run, entry.queues[queue][place]
        if thread not in self.active:
            try:
                if not run.events.issuperset(step.after) or not all(self._has_signal(run, wait) for wait in waits(step)):
                    return False
            except TagMismatch as error:
                self.outcome.mismatched.append(f"rank {me} call {run.number}: {error}")
                self.halted.add(me)
                return True
            self.active[thread] = self._execute(run, step)
        if next(self.active[thread], self) is not self:
            return True
        del self.active[thread]
        if step.record is not None:
            run.events.add(step.record)
        self.at[thread][1] += 1
        if queue is Queue.COMPUTE and self.at[thread][1] == len(entry.queues[queue]):
            if entry.returns:
                self._end(me, run)
            self.at[thread][:] = [number + 1, 0]
        return True

    def _skip_ended_calls(self, me: int, queue: Queue) -> None:
        """Move COPY to the next call once its steps of this call are done."""
        at = self.at[me, queue]
        while at[0] < len(self.programs[me]) and at[1] == len(self.programs[me][at[0]].queues[queue]):
            at[:] = [at[0] + 1, 0]

    def _has_signal(self, run: _RankCall, wait: Wait) -> bool:
        epoch = run.epoch - wait.back
        if epoch < 1:
            return True
        # The slots of ordinary calls take turns, and DONE waits look back by a multiple of their number.
        held, tag = self.words.get(self._word(run, wait.flag), (0, 0))
        if wait.back == 0 and (held > epoch or (held == epoch and tag != run.site.tag)):
            raise TagMismatch(f"{show(wait)} holds epoch {held} of site {tag}, expected epoch {epoch} of site {run.site.tag}")
        return held >= epoch

    def _word(self, run: _RankCall, flag: Flag) -> tuple[Any, ...]:
        """Return the place of a word. The rounds of an all_to_all share one."""
        return (run.site.group, run.slot, replace(flag, index=0) if run.site.key.is_all_to_all else flag)

    def _execute(self, run: _RankCall, step: Step) -> Iterator[None]:
        """Execute a step row by row."""
        match step:
            case Copy():
                for source, target in zip(self._rows(run, step.src), self._rows(run, step.dst), strict=True):
                    self._write(run, step.dst, target, self._read(run, step.src, source))
                    yield
            case Signal():
                self.words[self._word(run, step.flag)] = (run.epoch, run.site.tag)
            case Wait() if run.site.key.is_all_to_all and step.back == 0:
                self.words[self._word(run, step.flag)] = (0, 0)  # for the next round
            case Return() | Round():
                pass
            case Release():
                for wrong in self._wrong_rows(run):
                    self.outcome.wrong.extend(wrong)
                    yield
            case Compute():
                yield from self._matmul(run, step)
            case Reduce():
                columns = zip(*(self._rows(run, src) for src in step.srcs), strict=True)
                for target, column in zip(self._rows(run, step.dst), columns, strict=True):
                    parts = [self._read(run, src, row) for src, row in zip(step.srcs, column, strict=True)]
                    self._write(run, step.dst, target, ("sum", *parts))
                    yield
            case Finish():
                sums = Region(Buf.RESULT, run.rank, 0, index=step.index)
                self._write(run, sums, 0, ("rounded", self._read(run, sums, 0)))

    def _matmul(self, run: _RankCall, step: Compute) -> Iterator[None]:
        key = run.site.key
        if key.is_independent(step):
            self._write(run, step.writes[0], 0, ("matmul", step.index))
            yield
        elif key.kind.startswith("matmul_"):
            for region in step.writes:
                for row in self._rows(run, region):
                    before = self._read(run, region, row) if step.accumulate else ()
                    term = (*_stamp(run), "term", step.index, run.rank, product_shard(region), row)
                    self._write(run, region, row, (*before, term))
                    yield
        elif key.contracts[step.index]:
            region = step.writes[0]
            parts = self._read(run, region, 0) if step.accumulate else ()
            for source in step.reads:
                for row in self._rows(run, source):
                    parts = (*parts, self._read(run, source, row))
                    yield
            self._write(run, region, 0, parts)
        else:
            for source, target in zip(step.reads, step.writes, strict=True):
                for row, to in zip(self._rows(run, source), self._rows(run, target), strict=True):
                    self._write(run, target, to, ("matmul", step.index, self._read(run, source, row)))
                    yield

    def _rows(self, run: _RankCall, region: Region) -> range:
        return range(*extent(run.site.key, run.site.rows, region))

    def _read(self, run: _RankCall, region: Region, row: int) -> Any:
        if region.buf.in_arena:
            arena, offset = self._arena(run, region, row)
            return arena[offset]
        at = (region.buf, region.index, region.shard, row)
        if region.buf is Buf.INPUT and at not in run.memory:
            return (*_stamp(run), "input", run.rank, region.shard, row)
        return run.memory.get(at, EMPTY)

    def _write(self, run: _RankCall, region: Region, row: int, value: Any) -> None:
        if region.buf.in_arena:
            arena, offset = self._arena(run, region, row)
            arena[offset] = value
        else:
            run.memory[region.buf, region.index, region.shard, row] = value

    def _arena(self, run: _RankCall, region: Region, row: int) -> tuple[list[Any], int]:
        if run.site.key.is_all_to_all:
            row, region = row - self._rows(run, region).start, replace(region, index=0)  # rounds share an area
        stride = max(1, *run.site.rows)
        ranks = len(run.site.group)
        offset = (region.shard + (region.index + (region.buf is Buf.LANDING2)) * ranks) * stride + row
        arena = self.arenas.setdefault((run.site.group, run.slot, region.rank), [])
        arena.extend([EMPTY] * (offset + 1 - len(arena)))
        return arena, offset

    def _end(self, me: int, run: _RankCall) -> None:
        """End the call: check its results and free its inputs."""
        self.outcome.ended.append((run.number, me))
        for wrong in self._wrong_rows(run):
            self.outcome.wrong.extend(wrong)
        for shard in range(len(run.site.group)):
            for row in range(max(run.site.rows)):
                run.memory[Buf.INPUT, 0, shard, row] = FREED
                run.memory[Buf.PARTIAL, 0, shard, row] = (FREED,)

    def _wrong_rows(self, run: _RankCall) -> Iterator[list[str]]:
        """Yield for each row of the results a complaint if it is not as the op's definition says."""
        results = expected_rows(run.site.key, run.site.rows, run.rank, _stamp(run), run.memory)
        for (buf, index, shard, row), expected in results:
            held = self._read(run, Region(buf, run.rank, shard, index=index), row)
            where = f"rank {run.site.group[run.rank]} call {run.number} {buf.name}.{index}[{shard}] row {row}"
            yield [] if held == expected else [f"{where}: {held}"]


def _stamp(run: _RankCall) -> tuple[int, int]:
    """Return the stamp that distinguishes this call's data. Ranks with equal call counts have equal stamps."""
    return (run.site.tag, run.epoch)
