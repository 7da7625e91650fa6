"""Split collectives without a finish, on GPUs: eager ones, and in captures that fail."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.gpu.cases import BF16, Maker
from tests.gpu.lockstep import Lockstep
from tests.runtime.rank_abandoned import leave, whole
from tests.runtime.rank_failures import attempt
from tests.runtime.rank_split import COLLECTIVES, finish, start
from ub_overlap.runtime.session import session

OPS = torch.ops.ub_overlap


def expected(group: str, collective: str, x: torch.Tensor) -> torch.Tensor:
    return OPS.bulk(x, [], [], collective, "sum", x.dtype, "bulk", group, "/want")[0]


def after_exceptions(lockstep: Lockstep, group: str, turns: int) -> str:
    """Leave collectives open on all ranks, then use their slots, on another stream at times."""
    make, side = Maker(lockstep.device, lockstep.ranks), torch.cuda.Stream() if lockstep.cuda else None
    for turn in range(turns):
        for slot, collective in enumerate(COLLECTIVES):
            old, new = (make.randn(64 * lockstep.ranks, 256, dtype=BF16) for _ in range(2))
            want = expected(group, collective, new)
            lockstep.sync()
            with torch.cuda.stream(side if turn % 2 else None):
                leave(partial(start, group, collective, old, slot))
            got = whole(group, collective, new, slot)
            lockstep.sync()
            assert torch.equal(got, want), f"{collective}, turn {turn}"
    x = make.randn(64, 256, dtype=BF16)
    leave(lambda: finish(group, "all_gather", start(group, "all_gather", x, zero_copy=True), x, zero_copy=True))
    assert torch.equal(whole(group, "all_gather", x, 0, zero_copy=True), expected(group, "all_gather", x))
    lockstep.sync()
    session.check(group)
    return f"{turns} turns, bitwise"


def failed_capture(lockstep: Lockstep, group: str) -> str:
    """A capture fails between start and finish: nothing has run, and eager calls and the next capture work."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    x = Maker(lockstep.device, lockstep.ranks).randn(64, 256, dtype=BF16)
    want = expected(group, "all_gather", x)
    whole(group, "all_gather", x, 0)
    lockstep.sync()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            start(group, "all_gather", x)
            raise ValueError("in between")

    failed = attempt(capture)
    assert failed["error"], failed
    assert torch.equal(whole(group, "all_gather", x, 0), want)
    lockstep.sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = whole(group, "all_gather", x, 0)
    lockstep.barrier()
    graph.replay()
    lockstep.sync()
    assert torch.equal(got, want)
    session.check(group)
    return "bitwise"


def left_before_a_capture(lockstep: Lockstep, group: str) -> str:
    """An eager collective was left open: a capture of its slot is refused, and one eager call puts that right."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    x = Maker(lockstep.device, lockstep.ranks).randn(64, 256, dtype=BF16)
    want = expected(group, "all_gather", x)
    leave(partial(start, group, "all_gather", x))
    lockstep.sync()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            start(group, "all_gather", x)

    refused = attempt(capture)
    assert "cannot be finished in a CUDA graph" in refused["text"], refused
    assert torch.equal(whole(group, "all_gather", x, 0), want)
    lockstep.sync()
    session.check(group)
    return "bitwise"


def waits_on_another_stream(lockstep: Lockstep, group: str, turns: int) -> str:
    """The wait of a handle on a side stream keeps the input's memory until the pushes have read it."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no streams")
    import ub_overlap

    side, wrong = torch.cuda.Stream(), []
    for turn in range(turns):
        x = torch.full((1 << 22,), float(turn + lockstep.rank), device=lockstep.device)
        if lockstep.rank == 0:
            lockstep.sleep_on_device(0.002)
        handle = ub_overlap.all_gather(x, group, async_op=True, site="side")
        with torch.cuda.stream(side):
            got = handle.wait()
        del handle, x
        torch.full((1 << 22,), -1.0, device=lockstep.device)  # the freed input's memory, if it is free
        side.synchronize()
        want = torch.arange(lockstep.ranks, device=lockstep.device).repeat_interleave(1 << 22) + turn
        wrong += [turn] * (not torch.equal(got, want.float()))
        lockstep.sync()
    session.check(group)
    assert not wrong, wrong
    return f"{turns} turns, bitwise"


def test_after_exceptions(lockstep: Lockstep, group: str) -> None:
    lockstep.note(after_exceptions(lockstep, group, 4))


def test_failed_capture(lockstep: Lockstep, group: str) -> None:
    lockstep.note(failed_capture(lockstep, group))


def test_left_before_a_capture(lockstep: Lockstep, group: str) -> None:
    lockstep.note(left_before_a_capture(lockstep, group))


def test_waits_on_another_stream(lockstep: Lockstep, group: str) -> None:
    lockstep.note(waits_on_another_stream(lockstep, group, 10))
