"""Time collectives of few tokens: plain and as one kernel, alone and with residual and norm.

On CUDA every time is that of a CUDA graph of COUNT calls one after the other, as in a decode step. The plain form with a norm
is the collective and one kernel of Inductor. On the CPU the calls run one by one, and the norm is eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap.compiler.cost.fused_curves import FUSED_KINDS, WITH_NORM, without_peaks
from ub_overlap.compiler.cost.fused_time import strategies_of
from ub_overlap.runtime.ops.fused_collective import NO_BRANCH

from ..rank_process import World, capture_graph
from .kernels import Calls
from .world import Burst

COUNT = 20
EPSILON = 1e-5
KIB = 1 << 10
VECTOR = 16
"""Bytes of which a row of a fused collective has a multiple."""
SIZES = tuple(KIB * k for k in (4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384))
"""Bytes of the whole tensor: what is reduced, or what all ranks gather."""
CPU_SIZES = (4 * KIB, 64 * KIB)


def add_norm(reduced: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new residual and its RMSNorm, as models write it."""
    summed = reduced + residual
    wide = summed.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return summed, (wide * weight.float()).to(summed.dtype)


def measure(
    world: World, burst: Burst, calls: Calls, step: Callable[[str, int], None], quick: bool
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return curves by collective and form, as profiles have them. Collective. `step`: called behind each size."""
    sizes = sorted((SIZES if world.cuda else CPU_SIZES)[:: 2 if quick else 1], reverse=True)
    times: dict[str, dict[str, dict[int, float]]] = {kind: {} for kind in FUSED_KINDS}
    # The largest first: growth of the group's memory would keep the memory that graphs of smaller sizes address.
    epilogue = torch.compile(add_norm) if world.cuda else add_norm
    for size in sizes:
        for kind in FUSED_KINDS:
            forms = _forms(calls, kind, size, epilogue)
            found = world.worst([_us(world, burst, call) for call in forms.values()])
            for form, us in zip(forms, found, strict=True):
                times[kind].setdefault(form, {})[size] = us
        step("few tokens", 2)
    return {kind: {form: without_peaks(points) for form, points in by_form.items()} for kind, by_form in times.items()}


def points(cuda: bool, quick: bool) -> int:
    """Return the number of sizes, for a progress bar."""
    return len((SIZES if cuda else CPU_SIZES)[:: 2 if quick else 1])


def matrix_sizes(numbers: int, ranks: int, most_cols: int, vector: int) -> tuple[int, int]:
    """Return the rows and columns of a matrix of about `numbers` elements, in rows of whole vectors that ranks share evenly."""
    rows = ranks * max(1, -(-numbers // (ranks * most_cols)))
    return rows, max(vector, numbers // rows // vector * vector)


def _forms(calls: Calls, kind: str, size: int, epilogue: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Return the calls of a collective of `size` bytes by form (fused_curves.FORMS). `epilogue`: of the plain form."""
    ranks = calls.ranks
    rows, cols = matrix_sizes(size // calls.item, ranks, calls.cols, VECTOR // calls.item)
    whole = calls.tensor(rows, cols)
    rows = whole.shape[0] // (1 if kind == "all_reduce" else ranks)
    part = whole[:rows].clone()
    residual, weight = torch.zeros_like(part), calls.tensor(cols)
    source = part if kind == "all_gather" else whole
    plain: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_reduce": lambda: dist.all_reduce(part),
    }
    if kind == "all_reduce":
        part.zero_()  # in-place sums would overflow
    op: Any = torch.ops.ub_overlap.fused_collective.default

    def fused(strategy: str, norm: str) -> Callable[[], Any]:
        more = (residual, norm, weight) if norm != "none" else (None, norm, None)
        numerics = (None, EPSILON, True, False, 0.0, None, 0.0, 0.0, False, calls.dtype)
        rest = (*numerics, strategy, calls.group, f"calibrate/{kind} {strategy} {norm} {size}")
        return lambda: op(source, kind, "sum", *NO_BRANCH, *more, *rest)

    def plain_with_norm() -> Any:
        plain[kind]()
        return epilogue(part, residual, weight)

    forms: dict[str, Callable[[], Any]] = {"none": plain[kind]}
    forms |= {str(s): fused(str(s), "none") for s in strategies_of(kind)}
    if kind != "all_gather":
        forms["none" + WITH_NORM] = plain_with_norm
        forms |= {str(s) + WITH_NORM: fused(str(s), "rms") for s in strategies_of(kind)}
    return forms


def _us(world: World, burst: Burst, call: Callable[[], Any]) -> float:
    """Return the microseconds of one of COUNT calls in a CUDA graph; on the CPU of one of two calls."""
    if not world.cuda:
        return burst.us(call, 2, rounds=5, together=True)
    replay, kept = capture_graph(lambda: [call() for _ in range(COUNT)][-1], world)
    us = burst.us(replay, 1, rounds=9, together=True, warm=3, ahead=2) / COUNT
    del kept
    return us
