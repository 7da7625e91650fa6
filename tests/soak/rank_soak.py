"""Rank function of the soak: a batch of random calls, each compared with fp64 and with the plain op."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu import split_cases
from tests.gpu.cases import Truth, run_op
from ub_overlap.runtime import errors, ops, settings

from .random_case import LARGE_PIECE, SITES, RandomCall, draw_call
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
    fill_areas(group, rank, world)
    batch = _Batch(group, rank, world, seed, sabotage)
    for number in range(first, first + count):
        if not batch.run(number, is_last=number == first + count - 1):
            break
    return {"bad": batch.bad[:MAX_ERRORS], "broken": batch.is_broken, "resources": measure_resources(first + count)}


@functools.cache  # once in a process
def fill_areas(group: str, rank: int, world: int) -> None:
    """Exchange the largest pieces between all ranks in all slots.

    The areas of each pair of ranks are made, and become resident, by its first large piece. On 4 ranks that takes 18,000 random
    calls, in which memory seems to leak.
    """
    rows = [LARGE_PIECE // 4] * world
    for slot in range(SITES):
        cases = [split_cases.exchange(torch.zeros(sum(rows), 1), rows, rows, slot)]
        for step in range(world):  # of a ring
            to, source = ([rows[0] * (r == (rank + way) % world) for r in range(world)] for way in (step, -step))
            cases.append(split_cases.exchange(torch.zeros(rows[0], 1), source, to, slot, one_area=True))
        for case in cases:
            run_op(case, "bulk", group, f"/soak.exchange.{slot}")


class _Batch:
    """Runs calls in order. A split collective is finished before a later call, or at the end of the batch."""

    def __init__(self, group: str, rank: int, world: int, seed: int, sabotage: int) -> None:
        self.group, self.rank, self.world, self.seed, self.sabotage = group, rank, world, seed, sabotage
        self.bad: list[tuple[int, str]] = []
        self.is_broken = False
        self._open: list[_OpenCall] = []

    def run(self, number: int, is_last: bool) -> bool:
        """Run a call, and finish those that are due. Return whether the group still works."""
        call = draw_call(self.seed, number, self.rank, self.world)
        one = _OpenCall(number, call, Truth.of(call.case, self.group))
        time.sleep(call.late_s)
        C.testing.set_random_delay(call.step_delay_us, self.seed + number + self.rank)
        try:
            if call.case[0] in split_cases.FINISH:
                one.token = split_cases.start(call.case, call.strategy, self.group, call.site)
                self._open.append(one)
            else:
                self._check(one, run_op(call.case, call.strategy, self.group, call.site))
            for one in self._due(number, is_last):
                self._open.remove(one)
                outs = split_cases.finish(one.token, one.call.case, one.call.strategy, self.group, one.call.site)
                self._check(one, outs)
        except errors.UbOverlapError as error:
            self.bad.append((one.number, f"{one.call.name}: {type(error).__name__}: {error}"))
            self.is_broken = True
        finally:
            C.testing.set_random_delay(0, 0)
        return not self.is_broken

    def _due(self, number: int, is_last: bool) -> list[_OpenCall]:
        """Return the open calls that are finished behind call `number`."""
        return [one for one in self._open if is_last or one.number + one.call.calls_between <= number]

    def _check(self, one: _OpenCall, outs: list[torch.Tensor]) -> None:
        if one.number == self.sabotage and self.rank == self.world - 1:
            outs = [out.double().add(1).to(out.dtype) if out.is_floating_point() else out for out in outs]
        try:
            one.truth.check(outs, one.call.name)
        except AssertionError as error:
            self.bad.append((one.number, str(error)))


@dataclass
class _OpenCall:
    """A call and its expected results. `token`: of its start, where it is a split collective."""

    number: int
    call: RandomCall
    truth: Truth
    token: Any = None
