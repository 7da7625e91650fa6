"""CUDA_DEVICE_MAX_CONNECTIONS = 1, 8, 32: every op is right, none hangs; median times.

CUDA reads the variable when it starts, so each value has its own torchrun. A hang or a wrong number fails; a slow-down
is only reported.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import cases
from tests.gpu.cases import AG, AR, BF16, BULK, PLAIN, RS, Maker, Truth
from tests.gpu.lockstep import Lockstep
from tests.gpu.torchrun import test_functions, test_graphs
from ub_overlap.runtime.session import session

VALUES = (1, 8, 32)


def medians(lockstep: Lockstep, bodies: dict[str, Callable[[], Any]], count: int, warm: int = 3) -> dict[str, float]:
    """Return median ms per name on the device (CPU: on the thread), maximum over ranks, bodies interleaved."""
    token = torch.zeros(1, device=lockstep.device)
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for turn in range(count + warm):
        for name, body in bodies.items():
            dist.all_reduce(token)  # the ranks start together
            if lockstep.cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                body()
                end.record()
                torch.cuda.synchronize()
                took = begin.elapsed_time(end)
            else:
                clock = time.perf_counter()
                body()
                took = (time.perf_counter() - clock) * 1e3
            if turn >= warm:
                times[name].append(took)
    worst = torch.tensor([statistics.median(times[name]) for name in bodies], device=lockstep.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(bodies, worst.tolist(), strict=True))


full_size = 8192


def made(lockstep: Lockstep) -> dict[str, Any]:
    make, ranks, size = Maker(lockstep.device, lockstep.ranks), lockstep.ranks, full_size if lockstep.cuda else 64
    return {
        AG: make.gather(BF16, 1, size // ranks, size, [PLAIN], False, False, n=size // 2),
        RS: make.scatter(BF16, 1, size // ranks, size, depths=[size // 2]),
        AR: make.reduce(BF16, size, size, size // 2),
        BULK: make.bulk(BF16, "all_gather", size // ranks, size),
    }


def pairs(ranks: int) -> list[tuple[str, str]]:
    return [
        (op, s) for op in (AG, RS, AR, BULK) for s in ([BULK] if op == BULK else ["pipelined", f"pipelined:chunks={2 * ranks}"])
    ]


@pytest.mark.parametrize(("op", "strategy"), pairs(int(os.environ.get("WORLD_SIZE", "2"))))
def test_op(lockstep: Lockstep, group: str, op: str, strategy: str) -> None:
    case = made(lockstep)[op]
    truth = Truth.of(case, str(dist.group.WORLD.group_name))  # type: ignore[union-attr]
    outs = [cases.run_op(case, strategy, group, f"connections.{op}.{strategy}") for _ in range(5)][-1]
    lockstep.sync()
    session.check(group)
    lockstep.note(f"error {truth.check(outs)[0]:.2g}")


one_queue = pytest.mark.skipif(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1", reason="only with one hardware queue")


@one_queue
def test_a_replay_and_an_eager_call_of_one_thread(lockstep: Lockstep, group: str) -> None:
    """All streams share one queue: an eager call stands behind a replay of its group, and runs when that has ended."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    lockstep.note(test_graphs.replay_and_eager_call(lockstep, group, 6))


@one_queue
def test_a_group_lock_that_is_never_released(lockstep: Lockstep, own_group: str) -> None:
    if not lockstep.cuda:
        pytest.skip("the CPU has no streams")
    lockstep.note(test_functions.group_lock_never_released(lockstep, own_group))


@pytest.mark.deadline(90)
def test_times(lockstep: Lockstep, group: str) -> None:
    """Medians in ms. A slow-down is shown, not judged."""
    plain, bodies = str(dist.group.WORLD.group_name), dict[str, Callable[[], Any]]()  # type: ignore[union-attr]
    for op, strategy in pairs(lockstep.ranks):
        site = f"connections.{op}.{strategy}"
        bodies[f"{op} {strategy}"] = lambda o=op, s=strategy, n=site: cases.run_op(made_once[o], s, group, n)
    made_once = made(lockstep)
    for op in made_once:
        bodies[f"{op} by NCCL + matmul"] = lambda o=op: cases.run_plain(made_once[o], plain)
    times = medians(lockstep, bodies, 10 if lockstep.quick else 30)
    lockstep.note(", ".join(f"{name} {ms:.3f}" for name, ms in times.items()))
