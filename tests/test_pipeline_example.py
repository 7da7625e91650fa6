"""examples/pipeline: schedules of torch.distributed.pipelining over channels, against one process without pipeline."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ub_overlap
from examples.pipeline import train
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from ub_overlap.runtime import ops
from ub_overlap.runtime.deferred_gradients import DeferredGradients

pytestmark = pytest.mark.tier("test")


def run(rank: int, world: int, arguments: list[str]) -> dict[str, Any]:
    """Train, and return the result with the overlapped sites and whether the stages' messages used channels."""
    torch._dynamo.reset()
    deferred: list[int] = []
    add = DeferredGradients.add
    with mock.patch.object(DeferredGradients, "add", lambda self, *args: deferred.append(1) or add(self, *args)):
        result = train.train(train.parse(arguments))
    result["deferred"] = len(deferred)
    groups = [session for session in ops.load().sessions() if ops.load().find_channels(session.group, "cpu") is not None]
    result["channels"] = len(groups)
    overlapped = [site for site, stats in ub_overlap.site_stats().items() if stats.transport == "shared memory"]
    result["sites"] = sum("ward." in site for site in overlapped)
    dist.barrier()
    return result


SCHEDULES = [
    (2, "--schedule 1F1B --blocks 4"),
    (2, "--schedule Interleaved1F1B --blocks 4 --compile --inner aot_eager"),
    (2, "--schedule ZBVZeroBubble --blocks 4"),
    (2, "--schedule 1F1B --blocks 4 --compile --inner aot_eager --defer"),
    (2, "--schedule ZBVZeroBubble --blocks 4 --compile --inner aot_eager --defer"),
    (2, "--schedule DualPipeV --blocks 4 --compile --inner aot_eager --defer"),
    (4, "--schedule ZBVZeroBubble --blocks 4 --tp 2 --compile --inner aot_eager --overlap force --defer"),
    (4, "--schedule ZBVZeroBubble --blocks 4 --dp 2 --microbatches 4 --compile --inner aot_eager --defer"),
    (4, "--schedule ZBVZeroBubble --blocks 8"),
    (4, "--schedule ZBVZeroBubble --blocks 8 --compile --inner aot_eager --defer"),
    (4, "--schedule ZBVZeroBubble --blocks 8 --compile --inner aot_eager"),
    (4, "--schedule Interleaved1F1B --blocks 8 --compile --inner aot_eager"),
    (4, "--schedule Interleaved1F1B --blocks 8 --compile --inner aot_eager --defer"),
    (4, "--schedule Interleaved1F1B --blocks 4 --tp 2 --compile --inner aot_eager --overlap force --defer"),
    (4, "--schedule Interleaved1F1B --blocks 4 --tp 2 --compile --inner aot_eager --overlap force"),
]
SHORT = (SCHEDULES[0], SCHEDULES[4])
"""Without graphs, and with deferred weight gradients."""


@pytest.mark.parametrize(("world", "arguments"), full_but(SHORT, SCHEDULES))
def test_gradients_of_the_first_step(request: pytest.FixtureRequest, world: int, arguments: str) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    results = pool.run(run, [*arguments.split(), "--steps", "3", "--width", "32"])
    for result in results:
        assert result["channels"] >= 1, "the messages did not use channels"
        assert result["loss_error"] < 1e-6 and result["gradient_error"] < 1e-5, result
        assert result["losses"] == pytest.approx(results[0]["losses"])
        assert bool(result["deferred"]) == ("--defer" in arguments), result
        if "force" in arguments:
            assert result["sites"] >= 4, "the stages were compiled, but no collective of theirs was overlapped"
