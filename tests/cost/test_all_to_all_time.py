"""Times of all_to_alls within a host: plain ones from measured curves, and the halves of split ones, by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cost.machine import MIB, PLAIN
from ub_overlap.compiler.cost import Profile, SiteShape
from ub_overlap.compiler.cost.all_to_all_time import area_bytes
from ub_overlap.compiler.cost.predict import collective_us
from ub_overlap.compiler.cost.split_time import split_times
from ub_overlap.runtime.schedule.steps import MAX_AREAS_BYTES

STEPS = replace(PLAIN.steps, begin_us=1.0, end_us=2.0, wait_us=4.0, arrive_us=8.0, flag_us=16.0, signal_us=32.0)
MACHINE = replace(PLAIN, steps=STEPS)
"""A push or copy takes 1 us per MiB."""
MEASURED = replace(PLAIN, collectives={**PLAIN.collectives, "all_to_all": {4: ((MIB, 3.0), (1024 * MIB, 3072.0))}})


def exchange(ranks: int, mib: int) -> SiteShape:
    """Return the shape of an exchange of `mib` MiB on each rank."""
    return SiteShape("all_to_all", ranks, "bfloat16", (), mib << 9, 1 << 10)


def test_one_round() -> None:
    """Three pushes of 64 MiB and their flags; then the copy of 256 MiB."""
    times = split_times(exchange(4, 256), 0, MACHINE)
    assert times.start_us == 1.0
    assert times.transfer_us == pytest.approx(3 * (64 + 16))
    assert times.finish_us == pytest.approx(4 + 256 + 2)


def test_rounds_of_large_pieces() -> None:
    """Pieces of 640 MiB in areas of 256 MiB: two more rounds, of 256 and of 128 MiB, which nothing hides."""
    times = split_times(exchange(4, 2560), 0, MACHINE)
    assert times.transfer_us == pytest.approx(3 * (256 + 16))
    handshake = 3 * 32 + 2 * 8 + 4
    assert times.finish_us == pytest.approx(4 + 2560 + 2 + 2 * handshake + 3 * (256 + 16) + 3 * (128 + 16))


def test_many_small_pushes_have_their_latency() -> None:
    """Seven pushes are priced one by one: a push has a least time, however small it is."""
    profile = replace(PLAIN, push=((MIB, 10.0), (8 * MIB, 17.0)))
    assert split_times(exchange(8, 8), 0, profile).transfer_us == pytest.approx(7 * 10)
    assert split_times(exchange(8, 0), 0, profile).transfer_us == pytest.approx(7 * 9)


def test_measured_curves_come_first() -> None:
    """By bytes that a rank sends and by ranks. Without a curve it is that of a gather, and the decision says so.

    Without that one it is the time of a push.
    """
    shape = exchange(4, 4)
    assert collective_us(shape, MEASURED) == pytest.approx(9.0) and split_times(shape, 0, MEASURED).assumed == ""
    assert collective_us(shape, PLAIN) == pytest.approx(2 * 3)
    assert split_times(shape, 0, PLAIN).assumed == (
        f"profile {PLAIN} has no times of all_to_all, which is assumed to take as long as an all_gather that sends as much"
    )
    empty = replace(PLAIN, collectives={})
    assert collective_us(shape, empty) == pytest.approx(15 + 3)
    assert split_times(shape, 0, empty).assumed.endswith("assumed to run as pushes do")
    assert split_times(SiteShape("bulk_all_gather", 4, "bfloat16", (), 1 << 20, 1), 0, PLAIN).assumed == ""


def test_profiles_with_and_without_curves() -> None:
    """A profile that was made before is read, and keeps its digest."""
    for profile in (PLAIN, MEASURED):
        again = Profile.from_json(profile.to_json(), "here")
        assert again == profile and ("all_to_all" in again.collectives) == (profile is MEASURED)


def test_areas() -> None:
    """Python and C++ limit areas alike."""
    assert area_bytes(4, 100.0) == 100 and area_bytes(4, 1e12) == MAX_AREAS_BYTES // 4
    assert area_bytes(3, 1e12) % 256 == 0
    header = (Path(__file__).parents[2] / "csrc/core/area_growth.h").read_text()
    limit = re.search(r"max_areas_bytes = int64_t\{1\} << (\d+);", header)
    assert limit is not None and 1 << int(limit[1]) == MAX_AREAS_BYTES
