"""Time matmuls whose product is stored at the ranks that own its shards (strategy direct), within calls of our op.

All ranks store at once, as in use. The calls start together behind a load, so clocks are those of steady work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ub_overlap.runtime.session import session

from ..rank_process import World
from .kernels import Calls, spans
from .world import Burst

Shape = tuple[int, int, int]
"""M, N, K of one rank's whole matmul."""
_PLANES = (
    (4096, 512), (4096, 1792), (4096, 3584), (4096, 7168),
    (8192, 1024), (8192, 2048), (8192, 3584), (8192, 7168), (8192, 14336),
)  # fmt: skip
_ROWS = (2048, 8192)
_CPU_SHAPES = ((64, 64, 64), (256, 128, 128), (512, 256, 256))
SLOWEST_LINK_GBS, OUTLIER = 200.0, 1.5
"""A shape that takes this many times what its matmul and its bytes over such a link take is measured again."""


def shapes(cuda: bool, quick: bool) -> list[Shape]:
    """Return the shapes to measure: from those that the link binds to those that the matmul does."""
    if not cuda:
        return [*_CPU_SHAPES]
    return [(m, n, k) for m in _ROWS[1 if quick else 0 :] for n, k in _PLANES[:: 2 if quick else 1]]


def measure(
    world: World, burst: Burst, calls: Calls, kernel_us: float, step: Callable[[str, int], None], quick: bool
) -> dict[str, Any]:
    """Return the profile's field "direct": the rate of stores over the link, and each shape's time. Collective.

    `step`: called with a text and a number of measurements behind each shape.

    The link's rate is the highest at which the stores of some shape ran, apart from the first shard's matmul, in whose time the
    link is idle. On CUDA a time stamp is a kernel too, so `kernel_us` is subtracted.
    """
    dtype, item, ranks = str(calls.dtype)[6:], calls.item, calls.ranks
    whole, stored = [], []
    measured = [(-(-m // (16 * ranks)) * 16 * ranks, n, k) for m, n, k in shapes(world.cuda, quick)]
    for m, n, k in measured:
        left, right = _operands(calls, m, n, k)
        out = torch.empty(m, n, device=world.device, dtype=calls.dtype)
        whole.append(burst.us(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), 4))
        stored.append(_time_stores(burst, calls, left, right, kernel_us))
        step("stores at peers", 2)
    whole, stored = world.worst(whole), world.worst(stored)
    for i, (m, n, k) in enumerate(measured):
        most = whole[i] + m * n * item * (ranks - 1) / ranks / (SLOWEST_LINK_GBS * 1e3)
        if stored[i] > OUTLIER * most:  # something has disturbed a rank
            stored[i] = min(stored[i], *world.worst([_time_stores(burst, calls, *_operands(calls, m, n, k), kernel_us)]))
    if world.cuda:
        session.check(calls.group)
    rates = []
    for (m, n, _), whole_us, us in zip(measured, whole, stored, strict=True):
        sent = m * n * item * (ranks - 1) / ranks
        rates.append(sent / (max(us - whole_us / ranks, 0.1 * us) * 1e3))
    return {
        "link_gbs": max(rates),
        "matmuls": [[dtype, ranks, m, n, k, us] for (m, n, k), us in zip(measured, stored, strict=True)],
    }


def _operands(calls: Calls, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return calls.tensor(m, k), calls.tensor(n, k).t()


def _time_stores(burst: Burst, calls: Calls, left: torch.Tensor, right: torch.Tensor, kernel_us: float) -> float:
    """Return the microseconds of a matmul with its stores, on this rank. Collective."""
    (m, k), n = left.shape, right.shape[1]

    def start_together() -> None:
        burst.load(2)
        if burst.together:
            burst.together()

    traces = calls.traces(_call(calls, left, right, f"calibrate/direct {m} {n} {k}"), before=start_together)
    return max(0.2, spans(traces, "COMPUTE", "matmul") - (kernel_us if burst.world.cuda else 0.0))


def _call(calls: Calls, left: torch.Tensor, right: torch.Tensor, site: str) -> tuple[Callable[[], Any], str]:
    op: Any = torch.ops.ub_overlap.matmul_reduce_scatter.default
    more = (None, 1, False, "sum", calls.dtype, False, "plain", [], [], "direct", calls.group, site)
    return lambda: op([left], [right], *more), site
