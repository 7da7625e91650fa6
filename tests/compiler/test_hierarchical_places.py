"""The places of hierarchical collectives: two transfers, of which the second sends the result of the first."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.compiler.test_placement import random_problem
from ub_overlap.compiler.windows.placement import NETWORK, PORT, Item, Limits, Transfer, place


def in_halves(transfers: list[Transfer], seed: int) -> list[Transfer]:
    """Return the transfers, some of them as two halves: across hosts and within one, or the other way round."""
    rng, found = random.Random(seed), list[Transfer]()
    for t in transfers:
        if rng.random() < 0.4:
            found.append(t)
            continue
        links = (NETWORK, PORT) if t.starts_late else (PORT, NETWORK)
        plain = {
            link: {"plain_us": t.plain_us * (link == NETWORK), "needed_us": t.needed_us * (link == NETWORK)} for link in links
        }
        first, second = (replace(t, group=f"{t.group}.{link}", link=link, **plain[link]) for link in links)
        found += [first, replace(second, first_half=len(found))]
    return found


@pytest.mark.parametrize("seed", range(100))
def test_halves_follow_each_other(seed: int) -> None:
    """Both halves of a hierarchical collective are placed, the second behind the first, or none. Slots stay exclusive."""
    items, whole, limits = random_problem(seed)
    transfers = in_halves(whole, seed)
    placed = place(items, transfers, limits)
    busy: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for k, (t, p) in enumerate(zip(transfers, placed, strict=True)):
        if p is not None:
            assert t.earliest <= p.start <= p.finish <= t.latest and p.start_number < p.finish_number
            busy.setdefault((t.group, p.slot), []).append((p.start_number, p.finish_number))
        if t.first_half is None:
            continue
        first = placed[t.first_half]
        assert (first is None) == (p is None), f"one half of transfer {k}"
        if first is not None and p is not None:
            assert first.finish <= p.start and first.finish_number < p.start_number
            assert t.is_required or first.saved_us + p.saved_us >= t.needed_us + transfers[t.first_half].needed_us
    for spans in busy.values():
        assert all(a[1] < b[0] for a, b in itertools.pairwise(sorted(spans)))


@pytest.mark.parametrize("gathers", [True, False])
def test_halves_of_several_collectives_overlap(gathers: bool) -> None:
    """The network carries one collective while the port carries another: all are hidden."""
    count = 14
    items = [Item(0.0), *[Item(300.0)] * count, Item(0.0)]

    halves = [("across", NETWORK), ("within", PORT)] if gathers else [("within", PORT), ("across", NETWORK)]
    transfers: list[Transfer] = []
    for k in range(6, count + 1):
        bounds = (0, k) if gathers else (count + 1 - k, count + 1)
        for n, (group, link) in enumerate(halves):
            plain = 500.0 if link == NETWORK else 0.0
            t = Transfer(group, *bounds, bounds[gathers], gathers, 1.0, 260.0, 1.0, plain, 100, link=link)
            transfers.append(replace(t, first_half=len(transfers) - 1) if n else t)
    placed = place(items, transfers, Limits(1 << 30, 8))
    assert all(p is not None and p.exposed_us == 0 for p in placed)
    spans = {
        group: [(p.start, p.finish) for p, t in zip(placed, transfers, strict=True) if p is not None and t.group == group]
        for group, _ in halves
    }
    assert any(a[0] < b[1] and b[0] < a[1] for a in spans["across"] for b in spans["within"])
