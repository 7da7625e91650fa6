"""Time of a matmul that stores each rank's shard of its product in that rank's memory (strategy direct).

    analytic = max( G, G / R + bytes to peers / link rate )        G: the whole matmul, stored locally
    time     = analytic * exp(mean of ln(measured / analytic) over the nearest measured shapes)

The matmul begins with the shards of peers, so the link is idle for about one shard's share of it. What the remote stores cost
beyond that depends on the shape and on how close both times are. So it is measured, and looked up by shape and by their ratio.
"""

from __future__ import annotations

import math
from functools import lru_cache

from .matmul_time import matmul_us
from .profile import Profile
from .site_shape import SIZES, SiteShape

NEAREST = 4
"""Measured shapes that are averaged."""
_SAME = 0.1
"""Squared octaves within which measured shapes weigh about the same."""


def has_direct_times(profile: Profile, shape: SiteShape) -> bool:
    """Return whether direct stores were measured for the shape's group size and element size."""
    return bool(_measured(profile, shape.ranks, SIZES[shape.dtype]))


def link_us(profile: Profile, ranks: int, dtype: str, m: int, n: int) -> float:
    """Return the microseconds in which the link alone takes the shards of a product [m, n] that belong to peers."""
    sent = m * n * SIZES[dtype] * (ranks - 1) / ranks
    rate = profile.direct.link_gbs if profile.direct else _push_gbs(profile)
    return sent / (rate * 1e3)


@lru_cache(maxsize=4096)
def direct_us(profile: Profile, ranks: int, dtype: str, m: int, n: int, k: int, batch: int = 1) -> float:
    """Return the microseconds of the product [m, k] @ [k, n], stored at its owners. `batch`: row blocks of a shard."""
    if min(m, n, k) <= 0:
        return 0.0
    us, ratio = _analytic(profile, ranks, dtype, m, n, k, batch)
    points = _measured(profile, ranks, SIZES[dtype])
    if not points:
        return us
    at = (math.log2(m), math.log2(n), math.log2(k), ratio)
    near = sorted((math.dist(at, place) ** 2, residual) for place, residual in points)[:NEAREST]
    weights = [1.0 / (distance + _SAME) for distance, _ in near]
    return us * math.exp(sum(w * residual for w, (_, residual) in zip(weights, near, strict=True)) / sum(weights))


def _analytic(profile: Profile, ranks: int, dtype: str, m: int, n: int, k: int, batch: int = 1) -> tuple[float, float]:
    """Return the analytic time, and the octaves between the times of link and matmul."""
    blocks = ranks * batch if batch > 1 else 1
    product = matmul_us(profile, dtype, "nt", max(1, m // blocks), n, k, blocks)
    link = link_us(profile, ranks, dtype, m, n)
    return max(product, product / ranks + link), math.log2(link / product)


@lru_cache(maxsize=32)
def _measured(profile: Profile, ranks: int, size: int) -> tuple[tuple[tuple[float, ...], float], ...]:
    """Return (log2 of M, N, K and of link / matmul; ln(measured / analytic)) of each measurement."""
    points = []
    for dtype, measured_ranks, m, n, k, us in profile.direct.matmuls if profile.direct else ():
        if measured_ranks == ranks and SIZES[dtype] == size:
            analytic, ratio = _analytic(profile, ranks, dtype, m, n, k)
            points.append(((math.log2(m), math.log2(n), math.log2(k), ratio), math.log(us / analytic)))
    return tuple(points)


def _push_gbs(profile: Profile) -> float:
    """Return the rate of the largest measured push, for a forced strategy that was not measured."""
    size, us = profile.push[-1]
    return size / (us * 1e3)
