"""Rank function of the soak: a batch of random calls, each compared with fp64 and with the plain op."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.cases import Truth, run_op
from ub_overlap.runtime import errors, ops, settings

from .random_case import draw_call
from .resources import measure_resources

C = ops.extension()
MAX_ERRORS = 5
"""Errors of a batch that are reported."""


def run_batch(rank: int, world: int, seed: int, first: int, count: int, sabotage: int) -> dict[str, Any]:
    """Run calls first .. first + count - 1 of the soak `seed` on the world's group.

    Return {"bad": (number, text) of wrong results, "broken": whether an op raised, "resources"}.
    `sabotage`: the number of a call whose result the last rank changes, to test the soak itself; -1 for none.
    """
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    # oneDNN keeps compiled primitives of up to 1024 shapes, about 300 KB each: resident memory would grow with the shapes.
    torch.backends.mkldnn.enabled = False
    settings.configure(step_timeout_s=60.0, init_timeout_s=60.0)
    bad: list[tuple[int, str]] = []
    broken = False
    for number in range(first, first + count):
        call = draw_call(seed, number, rank, world)
        truth = Truth.of(call.case, group)
        time.sleep(call.late_s)
        C.testing.set_random_delay(call.step_delay_us, seed + number + rank)
        try:
            outs = run_op(call.case, call.strategy, group, call.site)
        except errors.UbOverlapError as error:
            bad.append((number, f"{call.name}: {type(error).__name__}: {error}"))
            broken = True
            break
        finally:
            C.testing.set_random_delay(0, 0)
        if number == sabotage and rank == world - 1:
            outs = [out.double().add(1).to(out.dtype) if out.is_floating_point() else out for out in outs]
        try:
            truth.check(outs, call.name)
        except AssertionError as error:
            if len(bad) < MAX_ERRORS:
                bad.append((number, str(error)))
    return {"bad": bad, "broken": broken, "resources": measure_resources(first + count)}
