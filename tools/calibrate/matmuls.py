"""Time matmuls over a grid of shapes, with random normal data in other memory at every call, so that no cache holds it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.cost.matmul_time import analytic_us
from ub_overlap.compiler.cost.profile import Profile

from .world import Burst, CalibrationWorld, ProgressLine

Shape = tuple[int, int, int]
Point = tuple[str, str, int, int, int]
"""layout, dtype, M, N, K; layouts as in the cost model: "nt" x @ w.t(), "nn" x @ w, "tn" x.t() @ y."""

_ROWS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
_PLANES = (
    (512, 512), (512, 2048), (512, 8192), (1024, 1024), (1024, 4096), (1024, 8192), (1024, 16384), (1280, 8192),
    (1536, 4096), (2048, 512), (2048, 2048), (2048, 8192), (2560, 5120), (3072, 4096), (3584, 8192), (4096, 512),
    (4096, 1024), (4096, 2048), (4096, 4096), (4096, 7168), (4096, 14336), (5120, 8192), (6144, 3072), (6144, 6144),
    (6144, 12288), (7168, 4096), (7168, 8192), (8192, 1024), (8192, 2048), (8192, 3584), (8192, 5120), (8192, 8192),
    (8192, 14336), (8192, 16384), (10240, 4096), (12288, 1536), (12288, 4096), (12288, 12288), (14336, 4096), (14336, 8192),
    (16384, 8192), (24576, 4096), (28672, 4096), (28672, 8192),
)  # fmt: skip
"""(N, K) of the grid."""
_FEW = ((1024, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 2048), (8192, 2048, 8192), (2048, 8192, 8192), (8192, 8192, 8192))
_CPU_ROWS, _CPU_PLANES = (16, 64, 256, 1024), ((32, 64), (64, 256), (256, 64), (256, 256), (512, 512), (1024, 256))
MAX_FLOPS = 4.2e12
POOL = 1 << 28
"""Elements of each operand's memory."""
OUTLIER, MOST_AGAIN = 1.5, 24
"""Times that are this much longer than computed are measured again, at most so many."""


def points(cuda: bool, quick: bool) -> list[Point]:
    """Return the points to measure, in an order that mixes sizes: drifting clocks then affect all parts of the grid alike."""
    if cuda:
        grid = [(m, n, k) for m in _ROWS[:: 2 if quick else 1] for n, k in _PLANES[:: 3 if quick else 1]]
        few: tuple[Shape, ...] = _FEW[:3] if quick else _FEW
        wide = "bfloat16"
        others: list[Point] = [(layout, wide, s[0], s[1], s[2]) for layout in ("nn", "tn") for s in few]
        others += [("nt", dtype, m, n, k) for dtype in ("float8", "float16") for m, n, k in few]
        others += [("nt", "float32", m, n, k) for m, n, k in few[:2]]
    else:
        grid = [(m, n, k) for m in _CPU_ROWS for n, k in _CPU_PLANES[:: 2 if quick else 1]]
        wide = "float32"
        others = [(layout, wide, 256, 256, 256) for layout in ("nn", "tn")]
        others += [("nt", "bfloat16", m, 256, 256) for m in (64, 256)]
    all_points: list[Point] = [("nt", wide, *s) for s in grid if 2.0 * s[0] * s[1] * s[2] <= MAX_FLOPS and _fits_pool(s)]
    all_points += others
    random.Random(0).shuffle(all_points)
    return all_points


def _fits_pool(shape: Shape) -> bool:
    m, n, k = shape
    return max(m * k, k * n, m * n) <= POOL


class OperandPool:
    """Memory for operands, sized for the device. Each call uses views at other offsets."""

    def __init__(self, world: CalibrationWorld, dtype: str) -> None:
        self.dtype = dtype
        size = POOL if world.cuda else 1 << 21
        kind: torch.dtype = getattr(torch, "float8_e4m3fn" if dtype == "float8" else dtype)
        self.parts: list[torch.Tensor] = []
        for _ in range(2):
            part = torch.empty(size, device=world.device, dtype=torch.bfloat16 if dtype == "float8" else kind).normal_()
            self.parts.append(part.to(kind))
        self.out = torch.empty(size, device=world.device, dtype=torch.bfloat16 if dtype == "float8" else kind)
        self.one = torch.ones((), device=world.device, dtype=torch.float32)

    def call(self, layout: str, shape: Shape) -> Callable[[], Any]:
        """Return a call that multiplies, each time with the next views of the pool."""
        m, n, k = shape
        lefts, rights = self._views(0, m * k), self._views(1, k * n)
        out = self.out[: m * n].view(m, n)
        turn = [0]

        def call() -> Any:
            turn[0] += 1
            left, right = lefts[turn[0] % len(lefts)], rights[turn[0] % len(rights)]
            x = left.view(k, m).t() if layout == "tn" else left.view(m, k)
            y = right.view(n, k).t() if layout == "nt" else right.view(k, n)
            if self.dtype == "float8":
                scaled: Any = compat.scaled_mm
                return scaled(x, y, scale_a=self.one, scale_b=self.one, out_dtype=torch.bfloat16)
            return torch.mm(x, y, out=out)

        return call

    def _views(self, part: int, count: int) -> list[torch.Tensor]:
        step = -(-count // 256) * 256
        offsets = range(0, max(1, self.parts[part].numel() - count + 1), step)
        return [self.parts[part][at : at + count] for at in list(offsets)[:8]]


def measure(
    world: CalibrationWorld, burst: Burst, progress: ProgressLine, quick: bool, limit_s: float
) -> list[tuple[Any, ...]]:
    """Return [layout, dtype, M, N, K, microseconds] of every point within the budget, for the slowest rank. Collective."""
    all_points = points(world.cuda, quick)
    timed: list[tuple[Point, float]] = []
    dtypes = dict.fromkeys(p[1] for p in all_points)
    for dtype in dtypes:
        selected = [p for p in all_points if p[1] == dtype]
        timed += (
            world.probe(
                f"matmuls of {dtype}", lambda d=dtype, s=selected: _measure_dtype(world, burst, progress, d, s, limit_s)
            )
            or []
        )
        if world.cuda:
            torch.cuda.empty_cache()
    slowest = world.worst([us for _, us in timed])
    return [(*point, round(us, 3)) for (point, _), us in zip(timed, slowest, strict=True)]


def measure_again(
    world: CalibrationWorld, burst: Burst, progress: ProgressLine, rows: list[tuple[Any, ...]], profile: Profile
) -> list[tuple[Any, ...]]:
    """Return `rows` with shorter times of outliers, which are measured once more. Collective.

    An outlier takes much longer than `profile` computes from the rates of all rows: something has disturbed a rank.
    """
    late = {row[:5]: row[5] / analytic_us(profile, row[1], row[0], *row[2:5]) for row in rows}
    outliers = sorted((point for point in late if late[point] > OUTLIER), key=lambda point: (-late[point], point))[:MOST_AGAIN]
    again: dict[Point, float] = {}
    for dtype in dict.fromkeys(point[1] for point in outliers):
        selected = [point for point in outliers if point[1] == dtype]
        timed = world.probe(
            f"outliers of {dtype}", lambda d=dtype, s=selected: _measure_dtype(world, burst, progress, d, s, math.inf)
        )
        points, times = zip(*timed, strict=True) if timed else ((), ())
        again |= zip(points, world.worst([*times]), strict=True)
        if world.cuda:
            torch.cuda.empty_cache()
    return [(*row[:5], round(min(row[5], again.get(row[:5], row[5])), 3)) for row in rows]


def _measure_dtype(
    world: CalibrationWorld, burst: Burst, progress: ProgressLine, dtype: str, selected: list[Point], limit_s: float
) -> list[tuple[Point, float]]:
    pool = OperandPool(world, dtype)
    burst.settle(0.2)
    timed: list[tuple[Point, float]] = []
    for number, point in enumerate(selected):
        # Ranks must stop at the same point, so they compare clocks every 16 points.
        if number % 16 == 15 and world.spent() > limit_s:
            world.holes.append(f"matmuls of {dtype}: {len(selected) - number} points left out, time was up")
            break
        shape = point[2:]
        us = 2e-6 * shape[0] * shape[1] * shape[2] / (600 if world.cuda else 0.03)  # estimate
        count = max(2, min(16, int(1500 / (us + 4)))) if world.cuda else max(1, min(20, int(2000 / (us + 4))))
        timed.append((point, burst.us(pool.call(point[0], shape), count, rounds=5 if world.cuda else 7)))
        progress.step("matmuls", 1)
    return timed
