"""Time of one matmul: an analytic model of tiles in waves, corrected by its measured error near that shape.

    analytic = launch + max( waves * (2 tm tn K / (rate of a unit * efficiency) + wave_us), bytes / memory )
               at the best tile (tm, tn) and the best split of K
    time     = analytic * exp(mean of ln(measured / analytic) over the nearest measured shapes)

The waves model the jumps between neighboring shapes, and the measured ratio the library's efficiency at a size. Together they
predict shapes that were never measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from .profile import Profile
from .site_shape import SIZES

NEAREST = 12
"""Measured shapes that are averaged."""
_SPLITS = (1, 2, 3, 4)
_SPLIT_US = 3.0
_SPLIT_WAVES = 1.6
"""K is split only while the pieces need no more waves than this."""
_CACHE_SHARE = 0.8
_OTHER_LAYOUT = 1.0
"""Distance of another layout, in octaves."""
_SAME = 0.3
"""Squared octaves within which measured shapes weigh about the same: averaging removes the error of one measurement."""


@lru_cache(maxsize=65536)
def matmul_us(profile: Profile, dtype: str, layout: str, m: int, n: int, k: int, batch: int = 1, again: bool = False) -> float:
    """Return the microseconds of `batch` products [m, k] @ [k, n], launch included; 0 for empty ones. `again`: the product
    before had the same right operand."""
    if min(m, n, k, batch) <= 0:
        return 0.0
    # Measurements read their operands from memory. The error is assumed to be the same where the cache holds them.
    residual = _residual(profile, dtype, layout, m * batch, n, k)
    return analytic_us(profile, dtype, layout, m, n, k, batch, again) * math.exp(residual)


def analytic_us(
    profile: Profile, dtype: str, layout: str, m: int, n: int, k: int, batch: int = 1, again: bool = False
) -> float:
    """Return the same by the analytic model alone."""
    c = profile.compute
    rate = c.tflops.get(dtype) or c.tflops["bfloat16"] * (0.07 if dtype == "float32" else 1.0)
    unit = rate * 1e6 / c.units  # operations a microsecond
    size = SIZES[dtype]
    best = math.inf
    for tm, tn, efficiency in c.tiles:
        tiles = batch * -(-m // tm) * -(-n // tn)
        for split in _SPLITS:
            if split > 1 and (tiles * split > _SPLIT_WAVES * c.units or k // split < 512):
                break
            waves = -(-tiles * split // c.units)
            us = waves * (2 * tm * tn * (k / split) / (unit * efficiency) + c.wave_us)
            if split > 1:
                us += _SPLIT_US + split * batch * m * n * 8 / (c.memory_gbs * 1e3)
            best = min(best, us)
    # A batch is a batch of rows: all of it has the same right operand.
    stays = again and k * n * size <= _CACHE_SHARE * c.cache_mib * 2**20
    moved = (batch * (m * k + m * n) + (0 if stays else k * n)) * size / (c.memory_gbs * 1e3)
    return (c.launch_us + max(best, moved)) * c.layouts.get(layout, 1.0)


@dataclass(frozen=True, slots=True)
class _Measured:
    """The measurements, as seen from one layout. `axes`: the distinct log2 of M, of N and of K. `points`: by the index of M:
    the indices of N and K, the distance that another layout adds, and ln(measured / analytic)."""

    axes: tuple[tuple[float, ...], ...]
    points: tuple[tuple[tuple[int, int, float, float], ...], ...]


@lru_cache(maxsize=32)
def _measured(profile: Profile, dtype: str, layout: str) -> _Measured:
    """Return the measurements; those of bfloat16 where nothing was measured in this dtype."""
    rows = [row for row in profile.matmuls if row[1] == dtype] or [row for row in profile.matmuls if row[1] == "bfloat16"]
    ms, ns, ks = (sorted({size[d] for size in [row[2:5] for row in rows]}) for d in range(3))
    points: list[list[tuple[int, int, float, float]]] = [[] for _ in ms]
    for kind, t, m, n, k, us in rows:
        ratio = math.log(us / analytic_us(profile, t, kind, m, n, k))
        points[ms.index(m)].append((ns.index(n), ks.index(k), _OTHER_LAYOUT if kind != layout else 0.0, ratio))
    return _Measured(tuple(tuple(map(math.log2, axis)) for axis in (ms, ns, ks)), tuple(map(tuple, points)))


@lru_cache(maxsize=65536)
def _residual(profile: Profile, dtype: str, layout: str, m: int, n: int, k: int) -> float:
    """Return ln(measured / analytic) near a shape: a mean, weighted by distance in octaves."""
    known = _measured(profile, dtype, layout)
    if not known.points:
        return 0.0
    # A choice calls this some dozen times for some hundred points. So go by rising distance in M, until that alone is too far.
    x, y, z = ([(at - a) * (at - a) for a in axis] for at, axis in zip(map(math.log2, (m, n, k)), known.axes, strict=True))
    near: list[tuple[float, float]] = []
    for far, i in sorted(zip(x, range(len(x)), strict=True)):
        if len(near) == NEAREST and far > near[-1][0]:
            break
        near += [(far + y[j] + z[h] + more, ratio) for j, h, more, ratio in known.points[i]]
        near = sorted(near)[:NEAREST]
    weights = [1.0 / (distance + _SAME) for distance, _ in near]
    return sum(w * ratio for w, (_, ratio) in zip(weights, near, strict=True)) / sum(weights)
