"""Recorded steps: step times of every op obey the proof's rules, and bytes move concurrently with matmuls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import cases
from tests.gpu.cases import Maker
from tests.gpu.lockstep import Lockstep
from tests.gpu.replay import Record, Violation, replay
from ub_overlap.runtime import ops, settings, stats
from ub_overlap.runtime.schedule.builders import build_all
from ub_overlap.runtime.schedule.steps import Key
from ub_overlap.runtime.session import session


def listen(into: list[Any]) -> None:
    """Record the keys of new schedules from now on."""
    provider = ops.ScheduleProvider()

    def provide(key: tuple[Any, ...], rank: int) -> list[tuple[int, ...]]:
        into.append(key)
        return provider(key, rank)

    ops.extension().set_provider(provide)


def check(lockstep: Lockstep, key: tuple[Any, ...], site: str) -> str:
    """Check the recorded steps of all ranks for the last call (or replay) of a site."""
    mine: list[Record] = [tuple(r) for r in ops.extension().last_trace(site)]
    schedules = build_all(Key(*key))
    done = replay(schedules, lockstep.gather(mine), one_clock=not lockstep.cuda)
    # The check can fail: the same records with the last data access moved to the front.
    place = max(i for i, r in enumerate(mine) if r[1] == "COMPUTE" and r[2] in ("reduce", "matmul", "copy", "finish"))
    step, queue, kind, _, _, size = mine[place]
    early = min(r[3] for r in mine) - 10_000_000
    moved = [*mine[:place], (step, queue, kind, early, early + 1, size), *mine[place + 1 :]]
    try:
        replay(schedules, lockstep.gather(moved), one_clock=not lockstep.cuda)
    except Violation:
        pass
    else:
        raise AssertionError("the replay does not notice a step that ran too early")
    clocks = "" if not lockstep.cuda else f", clocks {', '.join(f'{o / 1e3:.1f}' for o in done.offsets_ns)} us"
    return f"{done.edges} edges, {done.pairs} conflicts{clocks}"


def recorded(lockstep: Lockstep, group: str, kind: str, size: int, graph: bool) -> str:
    if graph and not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    case, strategy = Maker(lockstep.device, lockstep.ranks).kind(kind, size)
    keys: list[Any] = []
    listen(keys)
    settings.configure(trace=True)
    site = f"recorded.{kind}.{size}.{graph}"
    try:
        for _ in range(3):  # the first call builds the schedule, loads kernels and grows the arena
            cases.run_op(case, strategy, group, site)
        lockstep.sync()
        if graph:
            captured = torch.cuda.CUDAGraph()
            lockstep.barrier()
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                cases.run_op(case, strategy, group, site)
            lockstep.barrier()
            for _ in range(3):
                captured.replay()
            lockstep.sync()
        session.check(group)
        note = check(lockstep, keys[-1], site)
    finally:
        settings.configure(trace=False)
        ops.extension().set_provider(ops.ScheduleProvider())
    return note


def concurrent_bytes(lockstep: Lockstep, group: str, kind: str, size: int) -> str:
    """Bytes of a large op move while a matmul of the same call runs, summed over ranks."""
    make = Maker(lockstep.device, lockstep.ranks)
    if kind == "AG":
        case, strategy = make.gather(cases.BF16, 1, size, 2 * size, [cases.PLAIN], False, False, n=2 * size), "pipelined"
    else:
        case, strategy = make.scatter(cases.BF16, 1, size, 2 * size, depths=[2 * size]), "pipelined"
    site = f"concurrent.{kind}.{size}"
    settings.configure(trace=True)
    try:
        for _ in range(4):
            cases.run_op(case, strategy, group, site)
            lockstep.sync()
            lockstep.barrier()
        session.check(group)
        found = stats.site_stats()[site]
    finally:
        settings.configure(trace=False)
    every = lockstep.gather((found.bytes_overlapped, found.bytes_copied))
    hidden, copied = sum(h for h, _ in every), sum(c for _, c in every)
    if not 0 < hidden <= copied:
        raise AssertionError(f"{hidden} of {copied} bytes moved concurrently with a matmul")
    return f"{100 * hidden / copied:.0f}% of {copied / 2**20:.0f} MiB"


QUICK = ("AG", "AG2", "AG engine", "RS", "RS direct", "AR", "SAG", "SRS wire")
KINDS = [
    pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.full)
    for kind in (
        "AG",
        "AG2",
        "AG engine",
        "RS",
        "RS1",
        "RS striped",
        "RS direct",
        "RS direct 3",
        "AR",
        "AR direct",
        "SAG",
        "SAG2",
        "SRS",
        "SRS wire",
        "bulk",
        "bulk RS",
    )
]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "replayed graph"])
@pytest.mark.parametrize("size", [256, pytest.param(2048, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps(lockstep: Lockstep, group: str, kind: str, size: int, graph: bool) -> None:
    lockstep.note(recorded(lockstep, group, kind, size if lockstep.cuda else 256, graph))


@pytest.mark.parametrize("kind", ["AG", "RS"])
def test_bytes_concurrent_with_matmuls(lockstep: Lockstep, group: str, kind: str) -> None:
    lockstep.note(concurrent_bytes(lockstep, group, kind, 2048 if lockstep.cuda else 512))


@pytest.mark.parametrize("rows", [37, 125])
def test_scales_of_rows_may_begin_anywhere(lockstep: Lockstep, group: str, rows: int) -> None:
    """Pieces whose scales are not aligned to 16 bytes have the same bits, launched step by step and replayed."""
    if not lockstep.cuda:
        pytest.skip("the CPU does not replay calls")
    make, site = Maker(lockstep.device, lockstep.ranks), f"recorded.scales.{rows}"
    case = make.scaled_gather(cases.BF16, 1, rows, 256, True, keep=True)
    settings.configure(replay=False)
    try:
        expected = cases.run_op(case, "pipelined:chunks=4", group, site)
    finally:
        settings.configure(replay=True)
    for _ in range(6):
        assert not bool(cases.differs(cases.run_op(case, "pipelined:chunks=4", group, site), expected))
    lockstep.sync()
    session.check(group)
