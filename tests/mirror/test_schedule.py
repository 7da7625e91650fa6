"""Mirrored programs: two processes that both run rank 0's program serve each other, with both kinds of flag words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from benchmarks.mirror.schedule import mirror, source_at
from benchmarks.ops.peers import push_targets
from tests.harness.tiers import full_but
from tests.schedule.samples import keys
from ub_overlap.runtime.schedule import Key, build
from ub_overlap.runtime.schedule.interpret import FREED, Machine, SimulatedCall
from ub_overlap.runtime.schedule.op_contract import EMPTY
from ub_overlap.runtime.schedule.steps import Buf, Copy, Flag, FlagKind, Region, Schedule, Signal, Wait


def placed(value: Any, process: int) -> Any:
    """Return a schedule of rank 0 whose memory of rank 0 is that of `process`, and that of all peers the other one's."""
    if isinstance(value, tuple):
        return tuple(placed(item, process) for item in value)
    if isinstance(value, Region | Flag):
        return replace(value, rank=process if value.rank == 0 else 1 - process)
    if isinstance(value, Schedule):
        return replace(value, rank=process, steps=placed(value.steps, process))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: placed(getattr(value, field.name), process) for field in fields(value)})
    return value


class TwoProcesses(Machine):
    """Two processes that both run `program`, several times. Results may hold data of this call alone."""

    def __init__(self, programs: list[Schedule], seed: int) -> None:
        ranks = programs[0].key.ranks
        both = [(placed(program, 0), placed(program, 1)) for program in programs]
        group, absent = tuple(range(ranks)), range(2, ranks)
        calls = [SimulatedCall(pair, group, tag, (2,) * ranks) for tag, pair in enumerate(both, 1)]
        padded = [replace(call, schedules=(*call.schedules, *(call.schedules[0] for _ in absent))) for call in calls]
        super().__init__(padded, seed, skip=[(number, rank) for number in range(len(calls)) for rank in absent])
        self.results = 0

    def _wrong_rows(self, run: Any) -> Iterator[list[str]]:
        """Yield for each row of landing memory that is a result a complaint if it holds data of another call."""
        for shard in range(run.site.key.ranks):
            for row in range(2):
                self.results += 1
                held = self._read(run, Region(Buf.LANDING, run.rank, shard), row)
                bad = [leaf for leaf in leaves(held) if leaf != (run.site.tag, run.epoch)]
                yield [f"process {run.rank} call {run.number} landing[{shard}] row {row}: {bad}"] if bad else []

    def _end(self, me: int, run: Any) -> None:
        current = (run.site.tag, run.epoch)
        for (buf, _, shard, row), value in run.memory.items():
            if buf in (Buf.RESULT, Buf.OUTPUT):
                self.results += 1
                if bad := [leaf for leaf in leaves(value) if leaf != current]:
                    self.outcome.wrong.append(f"process {me} call {run.number} {buf.name}[{shard}] row {row}: {bad}")
        self.outcome.ended.append((run.number, me))
        for shard in range(len(run.site.group)):
            for row in range(2):
                run.memory[Buf.INPUT, 0, shard, row] = FREED
                run.memory[Buf.PARTIAL, 0, shard, row] = (FREED,)


class CudaWords(TwoProcesses):
    """The same with the words of csrc/cuda/waits.cu: READY has no epoch, and its owner clears it before DONE."""

    def _has_signal(self, run: Any, wait: Wait) -> bool:
        if wait.flag.kind is FlagKind.DONE:
            return super()._has_signal(run, wait)
        return self.words.get(self._word(run, wait.flag), (0, 0)) != (0, 0)

    def _execute(self, run: Any, step: Any) -> Iterator[None]:
        if isinstance(step, Signal) and step.flag.kind is FlagKind.DONE:
            cleared = source_at(step.flag.source, run.site.key.ranks)  # the rank that this DONE is sent to
            for group, slot, flag in list(self.words):
                mine = slot == run.slot and flag.rank == run.rank and flag.kind is not FlagKind.DONE
                if mine and flag.source == cleared:
                    self.words[group, slot, flag] = (0, 0)
        yield from super()._execute(run, step)


def leaves(value: Any) -> Iterator[Any]:
    """Return the stamps (tag, epoch) of all inputs and products in a symbolic row, and what is neither."""
    if value in (EMPTY, FREED):
        yield value
    elif isinstance(value, tuple) and len(value) > 2 and value[2] in ("input", "term"):
        yield value[:2]
    elif isinstance(value, tuple):
        for part in value:
            if isinstance(part, tuple) or part in (EMPTY, FREED):
                yield from leaves(part)


@pytest.mark.tier("test")
@pytest.mark.parametrize("machine", [TwoProcesses, CudaWords])
@pytest.mark.parametrize("ranks", full_but([3], [3, 4, 8]))
def test_two_processes_serve_each_other(ranks: int, machine: type[TwoProcesses]) -> None:
    """Calls of one kind, and of two kinds in turn, end in every process, with data of the same call."""
    samples = [mirror(build(key, 0)) for chunks in ((0, 2, 2 * ranks) if ranks < 8 else (0, 9)) for key in keys(ranks, chunks)]
    for number, program in enumerate(samples):
        for programs in ([program] * 4, [program, samples[number - 1]] * 2):
            run = machine(programs, seed=number)
            outcome = run.run()
            assert outcome.is_clean, (program.key, outcome)
            assert len(outcome.ended) == 2 * len(programs) and run.results, program.key


def test_programs_that_are_not_mirrored_block() -> None:
    """Two processes that run rank 0's own program wait for shards that no process sends."""
    for key in keys(4, 0):
        assert TwoProcesses([build(key, 0)], 0).run().blocked, key


def test_lost_clears_show() -> None:
    """A READY word that is not cleared lets a later call read data of an earlier one."""

    class Uncleared(CudaWords):
        def _execute(self, run: Any, step: Any) -> Iterator[None]:
            yield from Machine._execute(self, run, step)

    program = mirror(build(Key("all_gather_matmul", 4, contracts=(False,)), 0))
    assert any(Uncleared([program] * 4, seed).run().wrong for seed in range(20))


def test_pushes_arrive_in_the_order_in_which_they_are_awaited() -> None:
    """The i-th push of a process is the i-th shard that the other one awaits, as in the ring of R ranks."""
    for ranks in (3, 4, 8):
        steps = mirror(build(Key("all_gather_matmul", ranks, contracts=(False,)), 0)).steps
        sent = [step.dst.shard for step in steps if isinstance(step, Copy) and step.dst.rank != 0]
        awaited = [step.flag.source for step in steps if isinstance(step, Wait) and step.back == 0]
        assert sent == awaited == list(range(1, ranks))


def test_other_programs_are_refused() -> None:
    key = Key("all_gather_matmul", 4, contracts=(False,))
    with pytest.raises(ValueError, match="got rank 1"):
        mirror(build(key, 1))
    pushed = next(step for step in build(key, 0).steps if isinstance(step, Copy) and step.dst.rank != 0)
    foreign = replace(pushed, dst=replace(pushed.dst, shard=2))
    with pytest.raises(ValueError, match="only its own shard"):
        mirror(Schedule(key, 0, (foreign,)))


def test_independent_pushes() -> None:
    """In a real group each rank pushes to another peer at a time; in mirror mode all R-1 pushes go to the other process."""
    firsts = [push_targets(rank, 4, 4)[0] for rank in range(4)]
    assert sorted(process for process, _ in firsts) == [0, 1, 2, 3] and [place for _, place in firsts] == [0, 1, 2, 3]
    assert push_targets(0, 2, 4) == [(1, 1), (1, 2), (1, 3)] and push_targets(1, 2, 4) == [(0, 1), (0, 2), (0, 3)]
    assert push_targets(1, 2, 2) == [(0, 1)]
