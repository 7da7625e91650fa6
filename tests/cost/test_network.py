"""Times of collectives across hosts, by hand, and of their split halves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cost.machine import MIB, PLAIN
from ub_overlap.compiler.cost import SiteShape, candidates, load
from ub_overlap.compiler.cost.network import Network, network_us
from ub_overlap.compiler.cost.predict import collective_us
from ub_overlap.compiler.cost.split_time import hierarchical_times, split_times
from ub_overlap.compiler.plan.strategy import NONE

# 1 GB/s: a microsecond sends 1000 bytes. The link within a host sends a MiB in a microsecond.
NETWORK = Network("by hand", 1.0, 10.0, 1.0, 100.0, 0.25)


@pytest.mark.parametrize(
    ("collective", "ranks", "hosts", "sent", "us"),
    [
        ("all_gather", 2, 2, 1_000_000, 10 + 100 + 1000),
        ("all_gather", 16, 2, 1_000_000, 10 + 14 + 100 + 125),  # eight ranks of a host share its eight links
        ("reduce_scatter", 16, 16, 1_000_000, 10 + 15 * 100 + 1000),
        ("all_reduce", 16, 2, 1_000_000, 10 + 2 * (14 + 100) + 125),
        ("all_to_all", 16, 2, 1_500_000, 10 + 14 + 100 + 800),  # of 15 parts 8 leave the host, over one link
    ],
)
def test_by_hand(collective: str, ranks: int, hosts: int, sent: int, us: float) -> None:
    assert network_us(NETWORK, PLAIN.push, collective, ranks, hosts, sent) == pytest.approx(us)


def test_not_faster_than_the_link_within_a_host() -> None:
    fast = replace(NETWORK, gbs=1e6)
    assert network_us(fast, PLAIN.push, "all_gather", 4, 2, 512 * MIB) == pytest.approx(10 + 2 + 100 + 512)
    assert network_us(fast, PLAIN.push, "all_gather", 2, 2, 512 * MIB) == pytest.approx(10 + 100 + 512 * MIB / 1e9)


def test_measured_curves_come_first() -> None:
    measured = replace(NETWORK, collectives={"all_gather": {(4, 2): ((MIB, 7.0), (2 * MIB, 8.0))}})
    assert network_us(measured, PLAIN.push, "all_gather", 4, 2, MIB) == 7.0
    assert network_us(measured, PLAIN.push, "all_gather", 8, 2, MIB) != 7.0
    assert network_us(measured, PLAIN.push, "reduce_scatter", 4, 2, MIB) != 7.0


def test_halves() -> None:
    """The network carries the plain collective, and slows matmuls down by its own factor. Nothing is fused."""
    profile = replace(PLAIN, network=NETWORK)
    shape = SiteShape("bulk_reduce_scatter", 4, "bfloat16", (), 1 << 20, 1, out_dtype="float32", hosts=2)
    times = split_times(shape, 0, profile)
    assert times.transfer_us == times.plain_us == pytest.approx(10 + 2 + 100 + 0.75 * 4 * (1 << 20) / 2000)  # sent in fp32
    assert times.shortest_us == 0 and times.slowed_us == 0.25 * times.transfer_us and times.transfer_slowdown == 0
    assert candidates(replace(shape, matmuls=((8, 8, 8, False),)), profile) == [NONE]
    slowed = split_times(shape, 0, replace(PLAIN, network=replace(NETWORK, transfer_slowdown=0.5)))
    assert slowed == replace(times, transfer_slowdown=0.5, assumed=slowed.assumed), "matmuls slow it down, and nothing else"


def test_hierarchical_halves_by_hand() -> None:
    """Each rank sends over its own link what the ring of all ranks sends over all links of a host. The ring is longer."""
    profile = replace(PLAIN, network=NETWORK)
    shape = SiteShape("bulk_all_gather", 16, "bfloat16", (), 16 << 20, 1, hosts=4)
    across, within = hierarchical_times(shape, 0, profile)
    flat = split_times(shape, 0, profile)
    assert across.transfer_us == pytest.approx(10 + 3 * 100 + 3 * 2 * (1 << 20) / 1000)
    assert (across.plain_us, within.plain_us) == (flat.plain_us, 0.0)
    alone = split_times(replace(shape, ranks=4, hosts=1), 0, profile)
    assert within.transfer_us == alone.transfer_us and within.finish_us > alone.finish_us, "blocks are put in order"
    reduction = replace(shape, kind="bulk_reduce_scatter")
    first, second = hierarchical_times(reduction, 0, profile)
    assert second.transfer_us == across.transfer_us and second.plain_us == flat.plain_us
    assert first.start_us > split_times(replace(reduction, ranks=4, hosts=1), 0, profile).start_us


@pytest.mark.parametrize(
    ("collective", "ranks", "mib", "pays"),
    [
        ("all_gather", 512, 16, True),
        ("all_gather", 512, 1024, False),
        ("all_gather", 64, 16, False),
        ("reduce_scatter", 512, 64, True),
        ("reduce_scatter", 64, 4, True),
        ("reduce_scatter", 64, 256, False),
        ("reduce_scatter", 16, 256, False),
    ],
)
def test_where_a_hierarchical_collective_pays(collective: str, ranks: int, mib: int, pays: bool) -> None:
    """The assumed network: a shorter ring pays for many hosts and small tensors, not for the copies of a large one."""
    profile = load("h200")
    shape = SiteShape(f"bulk_{collective}", ranks, "bfloat16", (), mib * MIB // 2, 1, hosts=ranks // 8)
    halves, flat = hierarchical_times(shape, 0, profile), split_times(shape, 0, profile)
    assert (sum(t.shortest_us + t.slowed_us for t in halves) < flat.shortest_us + flat.slowed_us) is pays


def test_a_profile_without_a_network_prices_as_within_a_host() -> None:
    shape = SiteShape("bulk_all_gather", 4, "bfloat16", (), 1 << 20, 1, hosts=2)
    assert collective_us(shape, PLAIN) == collective_us(replace(shape, hosts=1), PLAIN)


def test_the_shipped_assumption_says_so() -> None:
    """A 70B layer's gather over 8 hosts is no faster than 8 links of 45 GB/s allow."""
    profile = load("h200")
    assert profile.network is not None and "not measured" in profile.network.source
    elements = 855_000_000
    shape = SiteShape("bulk_all_gather", 64, "bfloat16", (), elements, 1, hosts=8)
    us = collective_us(shape, profile)
    assert us > elements * 2 * 63 / 64 / 360e3 and us < 1.1 * elements * 2 / 340e3
    assert collective_us(replace(shape, ranks=512, hosts=64), profile) > us
