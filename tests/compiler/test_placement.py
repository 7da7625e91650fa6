"""The scheduler that places split collectives: bounds, slots, memory and what is reserved of it, order, links."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ub_overlap.compiler.windows.placement import NETWORK, PORT, Item, Limits, Placed, Transfer, place


def random_problem(seed: int) -> tuple[list[Item], list[Transfer], Limits]:
    """Return items, transfers and limits, half of them with memory reserved for some of the transfers."""
    rng = random.Random(seed)
    items = [Item(0.0)] * 3
    for _ in range(rng.randint(5, 60)):
        us = rng.choice([0.0, 5.0, 50.0, 600.0])
        items.append(Item(us, us * rng.choice([0.0, 0.0, 0.5]) if us > 5 else 0.0))
    items.append(Item(0.0))
    last, transfers = len(items) - 1, []
    for _ in range(rng.randint(1, 30)):
        at, late = rng.randint(3, last), rng.random() < 0.5
        us = rng.uniform(5, 300)
        transfers.append(
            Transfer(
                group=rng.choice(["a", "b"]),
                earliest=3 if late else at,
                latest=at if late else last,
                plain_at=min(at, last),
                starts_late=late,
                start_us=1.0,
                transfer_us=us,
                finish_us=us * 0.3,
                plain_us=us * 1.5,
                landing_bytes=rng.randint(1, 100),
                held_bytes=rng.randint(0, 100),
                needed_us=3.0,
                is_required=rng.random() < 0.1,
                link=rng.choice([PORT, NETWORK]),
                matmul_slowdown=0.03,
                transfer_slowdown=0.06,
            )
        )
    limits = Limits(rng.choice([100, 400, 10000]), rng.choice([1, 2, 8]))
    if rng.random() < 0.5:
        large = frozenset(k for k in range(len(transfers)) if rng.random() < 0.3)
        limits = replace(limits, reserved=rng.randint(0, limits.bytes), large=large)
    return items, transfers, limits


@pytest.mark.parametrize("seed", range(200))
def test_places_are_legal(seed: int) -> None:
    """Starts and finishes are in their windows, slots hold one transfer at a time, and memory stays below the limit.

    Only a required transfer may exceed it."""
    items, transfers, limits = random_problem(seed)
    zero_copy = in_place(transfers, items, seed)
    placed = place(items, transfers, limits, zero_copy)
    assert placed == place(items, transfers, limits, zero_copy)
    events: list[tuple[int, int, int, str]] = []
    for k, (t, p) in enumerate(zip(transfers, placed, strict=True)):
        if p is None:
            continue
        assert t.earliest <= p.start <= p.finish <= t.latest and 0 <= p.slot < limits.slots
        assert t.is_required or p.saved_us >= t.needed_us
        events += [(p.start, p.start_number, k, "start"), (p.finish, p.finish_number, k, "finish")]
        if p.release is not None:
            assert p.release == max(p.finish, zero_copy[k].release or 0) < len(items)
            events.append((p.release, p.release_number, k, "release"))
    numbers = [number for _, number, _, _ in sorted(events)]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(numbers)
    open_slots: dict[tuple[str, int], int] = {}
    sizes: Counter[tuple[str, int]] = Counter()
    held = 0
    for _, _, k, what in sorted(events):
        t, p = transfers[k], placed[k]
        assert p is not None
        slot = (t.group, p.slot)
        if what == "start":
            assert slot not in open_slots
            open_slots[slot] = k
            sizes[slot], held = max(sizes[slot], t.landing_bytes), held + t.held_bytes
            assert t.is_required or sum(sizes.values()) + held <= limits.bytes
        elif what == "finish":
            assert open_slots[slot] == k
            held -= t.held_bytes
        if what == ("finish" if p.release is None else "release"):
            assert open_slots.pop(slot) == k
    assert not open_slots


def in_place(transfers: list[Transfer], items: list[Item], seed: int) -> dict[int, Transfer]:
    """Return the zero-copy forms of some gathers, with last readers anywhere behind their finishes."""
    rng = random.Random(seed + 1)
    return {
        k: replace(t, release=rng.randint(0, len(items) - 1), release_us=2.0, finish_us=3.0)
        for k, t in enumerate(transfers)
        if t.starts_late and rng.random() < 0.7
    }


def test_results_that_are_read_for_long_are_copied() -> None:
    """Each gather hides, but the first is read again at the end. With two slots its result is copied; with more it is not."""
    count = 6
    items = [Item(600.0)] * count + [Item(0.0)]
    transfers = [Transfer("g", 0, k, k, True, 1.0, 160.0, 50.0, 300.0, 100, needed_us=3.0) for k in range(1, count)]
    forms = {k: replace(t, release=count if k == 0 else t.latest + 1, finish_us=5.0) for k, t in enumerate(transfers)}
    for slots, copied in ((2, {0}), (8, set())):
        placed = place(items, transfers, Limits(1 << 30, slots), forms)
        assert {k for k, p in enumerate(placed) if p is not None and p.release is None} == copied
        assert all(p is not None and p.exposed_us == 0 for p in placed)


def chain(count: int, us: float, transfer_us: float, limit: int = 1 << 30) -> list[Placed | None]:
    """Place the gathers of `count` items, each read by its own item."""
    items = [Item(us)] * count + [Item(0.0)]
    transfers = [
        Transfer("g", 0, k, k, True, 1.0, transfer_us, 5.0, transfer_us * 1.5, 100, needed_us=3.0) for k in range(count)
    ]
    return place(items, transfers, Limits(limit, 8))


def test_a_gather_is_hidden_by_the_item_before_its_reader() -> None:
    """With items longer than transfers nothing but the first gather is exposed, and few are open at a time."""
    placed = chain(10, 600.0, 160.0)
    assert placed[0] is None and all(p is not None and p.exposed_us == 0 for p in placed[1:])
    assert all(p is not None and p.finish - p.start == 1 for p in placed[1:])


def test_gathers_reach_over_several_items() -> None:
    """With items shorter than transfers a gather starts several items ahead, as memory allows."""
    placed = [p for p in chain(40, 100.0, 160.0) if p is not None]
    assert max(p.finish - p.start for p in placed) >= 2
    few = [p for p in chain(40, 100.0, 160.0, limit=100) if p is not None]
    assert few and all(p.slot == 0 for p in few)


def test_a_start_takes_a_slot_that_the_peers_have_left() -> None:
    """The slot of a gather that has just finished is taken only where memory allows no other, although it fits."""
    placed = [p for p in chain(10, 600.0, 160.0) if p is not None]
    slots = [p.slot for p in placed]
    assert all(a != b for a, b in itertools.pairwise(slots)) and max(slots) == 1
    few = [p for p in chain(10, 600.0, 160.0, limit=199) if p is not None]
    assert few and all(p.slot == 0 for p in few)


def test_links_are_independent() -> None:
    """Transfers of the network delay each other, and neither those of the port nor fused sites, which use the port."""

    def exposed(links: list[str], item: Item) -> list[float]:
        transfers = [Transfer("g", 0, 2, 2, False, 0.0, 100.0, 0.0, 200.0, 1, is_required=True, link=link) for link in links]
        placed = place([Item(0.0), item, Item(0.0)], transfers, Limits(1 << 30, 8))
        assert all(p is not None for p in placed)
        return [p.exposed_us for p in placed if p is not None]

    assert exposed([NETWORK], Item(120.0)) == [0.0]
    assert exposed([NETWORK, NETWORK], Item(120.0)) == [0.0, 80.0]
    assert exposed([NETWORK, PORT], Item(120.0)) == [0.0, 0.0]
    assert exposed([NETWORK], Item(120.0, 90.0, PORT)) == [0.0]
    assert exposed([PORT], Item(120.0, 90.0, PORT)) == [0.0]  # it went first: the fused site waits for it


def test_what_does_not_fit_in_memory_stays_plain() -> None:
    assert chain(5, 600.0, 160.0, limit=99) == [None] * 5


# --- small and large transfers ------------------------------------------------------------------------------------------


def small_and_large(large_group: str, large_us: float) -> tuple[list[Item], list[Transfer], Limits]:
    """Return 12 small gathers, each read by its own item, and a large one that is read last.

    The small ones are open four at a time, and their slots take all memory. With one slot each of them waits a little.
    `large_us`: what the large gather takes if it is not split.
    """
    items = [Item(100.0)] * 23 + [Item(0.0)]
    small = [Transfer("g", 0, k, k, True, 1.0, 160.0, 5.0, 240.0, 100, needed_us=3.0) for k in range(4, 16)]
    large = Transfer(large_group, 0, 22, 22, True, 1.0, 300.0, 5.0, large_us, 300, needed_us=3.0)
    return items, [*small, large], Limits(400, 8)


def total_us(placed: Sequence[Placed | None]) -> float:
    return sum(p.saved_us for p in placed if p is not None)


@pytest.mark.parametrize("group", ["g", "other"])
def test_memory_is_reserved_for_a_large_transfer(group: str) -> None:
    """It finds memory, in a slot of its own or of another group, although the small gathers before it would take all."""
    items, transfers, limits = small_and_large(group, 450.0)
    small = place(items, transfers[:-1], limits)
    assert {p.slot for p in small if p is not None} == set(range(4))  # of 100 bytes each
    placed = place(items, transfers, limits)
    assert placed[-1] is not None and all(p is not None for p in placed)
    assert total_us(placed) > total_us(small)


@pytest.mark.parametrize("group", ["g", "other"])
def test_small_transfers_that_save_more_keep_the_memory(group: str) -> None:
    """Look-alike: in one slot the small gathers would lose more than the large one saves."""
    items, transfers, limits = small_and_large(group, 200.0)
    (alone,) = place(items, transfers[-1:], limits)
    assert alone is not None and alone.exposed_us == 0
    small = place(items, transfers[:-1], limits)
    assert place(items, transfers, limits) == [*small, None]
    one_slot = place(items, transfers[:-1], replace(limits, bytes=100))
    assert total_us(one_slot) + alone.saved_us < total_us(small)


@pytest.mark.parametrize(("meanwhile", "exposed"), [(0.0, 400.0), (100.0, 320.0), (500.0, 0.0), (600.0, 0.0)])
def test_matmuls_slow_only_the_part_of_a_transfer_that_they_hide(meanwhile: float, exposed: float) -> None:
    """100 microseconds of matmuls hide 80 of a transfer that they slow down by a fourth. The rest has its own rate."""
    slowdowns = {"matmul_slowdown": 0.1, "transfer_slowdown": 0.25}
    transfer = Transfer("g", 1, 2, 1, False, 0.0, 400.0, 0.0, 400.0, 1, is_required=True, **slowdowns)
    (placed,) = place([Item(1.0), Item(meanwhile), Item(1.0)], [transfer], Limits(10, 1))
    assert placed is not None
    assert placed.exposed_us == pytest.approx(exposed)
    assert placed.saved_us == pytest.approx((400 - exposed) * 0.9)
