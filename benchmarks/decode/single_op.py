"""Time all_reduce + residual + RMSNorm of one size: NCCL, torch's symmetric-memory ops, and ours by strategy.

Every column is a CUDA graph of COUNT calls, one after the other, so ranks run in step as in a decode step. Times are per call.
On the CPU the calls run one by one, without a graph. In mirror mode (benchmarks/mirror) only ours runs, and only `one_shot` is
compared: the parts of a two-shot sum are those of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.ops.fused_collective import NO_BRANCH
from ub_overlap.runtime.session import session
from ub_overlap.tools.calibrate.few_tokens import COUNT, EPSILON, add_norm
from ub_overlap.tools.rank_process import World, capture_graph

from ..timing import Call, Clock

STRATEGIES = ("one_shot", "two_shot")
BOUND = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Largest allowed difference from NCCL's result, ||a - b|| / ||b||."""


@dataclass
class OpSize:
    """The tensors of one size. `shared`: symmetric memory of torch with the same sizes as `x`, None where there is none.

    `mirrored`: ranks of `group` in mirror mode, else 0.
    """

    world: World
    group: str
    x: Tensor
    residual: Tensor
    weight: Tensor
    mirrored: int = 0
    shared: Tensor | None = None

    @classmethod
    def make(cls, world: World, group: str, size: int, hidden: int, dtype: torch.dtype, mirrored: int = 0) -> OpSize:
        """Make tensors of `size` bytes, in rows of `hidden` numbers or fewer."""
        numbers = size // dtype.itemsize
        cols = min(hidden, numbers)

        def tensor(*sizes: int) -> Tensor:
            return torch.randn(*sizes, device=world.device).to(dtype)

        made = cls(world, group, tensor(numbers // cols, cols), tensor(numbers // cols, cols), tensor(cols), mirrored)
        for replicated in (made.residual, made.weight):
            dist.broadcast(replicated, 0)
        return made

    def share(self) -> Tensor:
        """Return symmetric memory that holds x. Collective; raises where there is none."""
        if self.shared is None:
            flat = compat.symmetric_empty(self.x.nbytes, self.world.device)
            compat.symmetric_rendezvous(flat, self.group, "")
            self.shared = flat.view(self.x.dtype).view(self.x.shape)
        self.shared.copy_(self.x)
        return self.shared

    def ours(self, strategy: str, norm: str) -> Call:
        """Return a call of our op."""
        residual, weight = (self.residual, self.weight) if norm != "none" else (None, None)
        numerics = (None, EPSILON, True, False, 0.0, None, 0.0, 0.0, False, self.x.dtype)
        args = (*NO_BRANCH, residual, norm, weight, *numerics, strategy, self.group, f"decode.{strategy}")
        return lambda: torch.ops.ub_overlap.fused_collective(self.x, "all_reduce", "sum", *args)

    def nccl(self, epilogue: Callable[..., Any] | None) -> Call:
        """Return a call of NCCL's all_reduce in place, and the epilogue."""
        buffer = self.x.clone()

        def call() -> Any:
            dist.all_reduce(buffer)
            return epilogue(buffer, self.residual, self.weight) if epilogue else (buffer,)

        return call

    def mirrored_results(self) -> dict[bool, tuple[Tensor, ...]]:
        """Return the sum of x over the ranks, as which the other process's x counts often; False: with residual and norm."""
        xs = [torch.empty_like(self.x) for _ in range(self.world.ranks)]
        dist.all_gather(xs, self.x)
        theirs = xs[1 - self.world.rank].float()
        reduced = (self.x.float() + (self.mirrored - 1) * theirs).to(self.x.dtype)
        return {True: (reduced,), False: add_norm(reduced, self.residual, self.weight)}

    def torch_op(self, name: str, epilogue: Callable[..., Any] | None) -> Call:
        """Return a call of an all_reduce of torch's symmetric memory, and the epilogue."""
        shared, op = self.share(), getattr(torch.ops.symm_mem, name)

        def call() -> Any:
            reduced = op(shared, "sum", self.group)
            return epilogue(reduced, self.residual, self.weight) if epilogue else (reduced,)

        return call


def columns(case: OpSize) -> dict[str, Callable[[], Call]]:
    """Return what makes the call of each column."""
    torch._dynamo.reset()  # torch limits the compilations of a function, one for each size
    epilogue = torch.compile(add_norm, dynamic=False) if case.world.cuda else add_norm
    rivals: dict[str, Callable[[], Call]] = {
        "nccl + norm": lambda: case.nccl(epilogue),
        "torch one_shot + norm": lambda: case.torch_op("one_shot_all_reduce", epilogue),
        "torch two_shot + norm": lambda: case.torch_op("two_shot_all_reduce_", epilogue),
        "nccl": lambda: case.nccl(None),
        "torch one_shot": lambda: case.torch_op("one_shot_all_reduce", None),
        "torch two_shot": lambda: case.torch_op("two_shot_all_reduce_", None),
    }
    made = {} if case.mirrored else rivals
    for strategy in STRATEGIES:
        made[f"{strategy} + norm"] = lambda s=strategy: case.ours(s, "rms")
        made[strategy] = lambda s=strategy: case.ours(s, "none")
    return made


def measure(case: OpSize, clock: Clock, iters: int, warm: int) -> dict[str, Any]:
    """Return the row as JSON values: `us` and `iqr` by column, `error` of ours, and `why` for columns without a time."""
    world = case.world
    us: dict[str, float] = {}
    why: dict[str, str] = {}
    error: dict[str, float] = {}
    calls: dict[str, Call] = {}
    expected: dict[bool, tuple[Tensor, ...]] = case.mirrored_results() if case.mirrored else {}
    for name, make in columns(case).items():
        if name.startswith("torch") and not world.cuda:
            why[name] = "needs CUDA"
            continue

        def ready(make: Callable[[], Call] = make) -> tuple[Call, Any]:
            call = make()
            return call, [out.clone() for out in call()]

        world.barrier()
        made, reason = world.agreed(ready)
        if reason:
            why[name] = reason
            continue
        calls[name], outs = made
        if name.startswith("nccl"):
            expected[name == "nccl"] = outs
        elif name.removesuffix(" + norm") in (STRATEGIES[:1] if case.mirrored else STRATEGIES):
            error[name] = difference(outs, expected[name in STRATEGIES], world)
            if not error[name] <= BOUND[case.x.dtype]:
                why[name] = f"wrong numbers: differs from NCCL by {error[name]:.3g} of its norm"
                del calls[name]
    # In-place sums would overflow over thousands of calls.
    for tensor in (case.x, case.residual, *([] if case.shared is None else [case.shared])):
        tensor.zero_()
    timed: dict[str, Call] = {}
    for name, call in calls.items():
        if not world.cuda:
            timed[name] = call
            continue
        many = [call] * COUNT
        made, reason = world.agreed(lambda many=many: capture_graph(lambda: [one() for one in many][-1], world))
        if reason:
            why[name] = f"no graph: {reason}"
        else:
            timed[name] = made[0]
    ms, iqr = clock.rounds(timed, iters, warm)
    per_call = 1e3 / (COUNT if world.cuda else 1)
    us = {name: value * per_call for name, value in ms.items()}
    session.check(case.group)
    return {
        "bytes": case.x.nbytes,
        "rows": case.x.shape[0],
        "us": us,
        "iqr": {name: value * per_call for name, value in iqr.items()},
        "error": error,
        "why": why,
    }


def difference(outs: Any, expected: Any, world: World) -> float:
    """Return the largest ||a - b|| / ||b|| of any output, of all ranks."""
    largest = 0.0
    for ours, theirs in zip((t for t in outs if t.numel()), expected, strict=False):
        norm = theirs.float().norm().item() or 1.0
        found = (ours.float() - theirs.float()).norm().item() / norm
        largest = max(largest, found if found == found else 1e9)
    return world.worst([largest])[0]
