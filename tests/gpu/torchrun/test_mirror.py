"""Mirror mode of the benchmarks on two GPUs: ops and replayed captures have the results of two ranks in the roles of R."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.mirror.collectives import MirrorCollectives
from benchmarks.mirror.group import MirrorGroups
from tests.gpu.lockstep import Lockstep
from tests.mirror import rank_mirror
from ub_overlap.runtime.session import session
from ub_overlap.tools.rank_process import World

OPS: Any = torch.ops.ub_overlap


@pytest.fixture
def world(lockstep: Lockstep, group: str) -> World:
    """The two processes. Mirror mode is for exactly two."""
    if lockstep.ranks != 2 or lockstep.shares_gpu:
        pytest.skip(f"needs 2 ranks, each with its GPU: got {lockstep.ranks}")
    return World(lockstep.rank, lockstep.ranks, lockstep.device, group, lockstep.control)


@pytest.mark.deadline(120)
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_every_op(lockstep: Lockstep, world: World, ranks: int) -> None:
    bad = rank_mirror.run_every_op(world, ranks)
    assert not bad, bad


@pytest.mark.deadline(120)
@pytest.mark.parametrize("ranks", [4, 8])
def test_replays(lockstep: Lockstep, world: World, ranks: int) -> None:
    """A captured gather and a captured scatter, replayed in turn with eager calls, on new data each time."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    groups, plain = MirrorGroups(world, ranks), MirrorCollectives(world, ranks)
    try:
        group, rows, width = groups.new_group(), 128, 512
        shard, weight, left, right = (
            torch.randn(*sizes, device=world.device).bfloat16()
            for sizes in ((rows, width), (width, 256), (ranks * rows, 256), (256, width))
        )

        def gather() -> Tensor:
            more = ([False], [False], 1, False, False, [], [], "pipelined", group, "ag")
            return OPS.all_gather_matmul(shard, [weight], *more)[1][0]

        def scatter() -> Tensor:
            more = (None, 1, False, "sum", torch.bfloat16, False, "plain", [], [], "pipelined", group, "rs")
            return OPS.matmul_reduce_scatter([left], [right], *more)[0]

        captured = [capture(gather), capture(scatter)]
        for turn in range(20):
            for tensor in (shard, left):
                tensor.normal_()
            whole = torch.empty(ranks * rows, width, device=world.device, dtype=torch.bfloat16)
            plain.gather(whole, shard)
            wanted = [whole @ weight, torch.empty(rows, width, device=world.device, dtype=torch.bfloat16)]
            plain.scatter(wanted[1], left @ right)
            got = [replay() if turn % 3 else eager() for replay, eager in zip(captured, (gather, scatter), strict=True)]
            for name, result, expected in zip(("gather", "scatter"), got, wanted, strict=True):
                error = float((result.float() - expected.float()).norm() / expected.float().norm())
                assert error < 2e-2, f"{name}, turn {turn}: differs by {error:.3g} of its norm"
        lockstep.sync()
        session.check(group)
    finally:
        lockstep.sync()
        groups.close()


def capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that replays `call` as a CUDA graph, and returns its result."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
