"""The times of the halves of an all_to_all within a host: equal pieces for all ranks, or one for one rank (a step of a ring).

    start      pushes the first round of each piece, which the graph hides
    finish     copies the received rows out, and runs the later rounds of pieces that are larger than their areas

A later round is exposed. Its pushes wait until the peers have copied the round before, and say so by READY2; the copies wait
for the peers' pushes (docs/explanation/all_to_all.md).
"""

from __future__ import annotations

from ub_overlap.runtime.schedule.steps import MAX_AREAS_BYTES

from .curve import at
from .profile import Profile
from .site_shape import SIZES, SiteShape

_GRANULE = 256
"""Areas are multiples of so many bytes."""


def area_bytes(areas: int, piece: float) -> float:
    """Return the bytes of one of `areas` areas for pieces of `piece` bytes, once they have grown."""
    return min(piece, MAX_AREAS_BYTES // areas // _GRANULE * _GRANULE)


def all_to_all_us(shape: SiteShape, profile: Profile) -> tuple[float, float]:
    """Return the microseconds of (the pushes of the first round, the finish)."""
    steps, peers = profile.steps, 1 if shape.to_one_rank else max(1, shape.ranks - 1)
    piece = shape.bytes_sent / peers
    area = area_bytes(1 if shape.to_one_rank else shape.ranks, piece)
    copy_us = at(profile.copy, shape.rows * shape.cols * SIZES[shape.dtype])
    later_us, left = 0.0, piece - area
    while left > 0:
        # READY2 to all sources, the way to them, their pushes, and the way back.
        handshake = peers * steps.signal_us + 2 * steps.arrive_us + steps.wait_us
        later_us += handshake + _pushes_us(profile, peers, min(area, left))
        left -= area
    return _pushes_us(profile, peers, area), steps.wait_us + copy_us + later_us + steps.end_us


def _pushes_us(profile: Profile, peers: int, size: float) -> float:
    return peers * (at(profile.push, size) + profile.steps.flag_us)
