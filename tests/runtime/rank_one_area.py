"""Rank functions of test_one_area.py: exchanges in which every rank receives from one rank at most."""

from __future__ import annotations

import random
from typing import Any

import torch

from ub_overlap.runtime import settings

from .rank_all_to_all import OPS, C, Matrix, area_bytes, exchange, finish, same, sample_matrices, sides, start
from .rank_failures import attempt, fresh
from .rank_sessions import reset


def permutation(world: int, order: random.Random, rows: int) -> Matrix:
    """Return rows of a random permutation: each rank sends to one rank, perhaps to itself. One sends nothing."""
    to = order.sample(range(world), world)
    return [[(rows + s if s else 0) if d == to[s] else 0 for d in range(world)] for s in range(world)]


def random_permutations(rank: int, world: int, times: int) -> list[str]:
    """Exchange permutations and pieces of any size in two slots, each of several rounds at times, with random delays."""
    name, order, bad = fresh(world), random.Random(world), []
    for slot in (0, 1):  # small areas
        exchange(name, *sides(rank, [[1] * world] * world)[:3], slot)
        exchange(name, *sides(rank, [[0] * world] * world)[:3], slot, site="/ring", one_area=True)
    with reset():
        C.testing.set_random_delay(100, 5 * rank)
        for step in range(times):
            opened = []
            for slot in (0, 1):
                is_ring = order.random() < 0.7
                rows = order.choice((1, 3_000, 40_000))
                if is_ring:
                    matrix = permutation(world, order, rows)
                else:
                    matrix = [[order.choice((0, 1, rows)) for _ in range(world)] for _ in range(world)]
                options: dict[str, Any] = {"site": "/ring", "one_area": True} if is_ring else {}
                given = sides(rank, matrix, (4,), torch.float32, step)
                opened.append((slot, options, given, start(name, *given[:3], slot, **options)))
            OPS.bulk(torch.ones(2), [], [], "all_gather", "sum", torch.float32, "bulk", name, "/b")
            for slot, options, given, token in opened:
                if not same(finish(name, token, *given[:3], slot, **options), given[3]):
                    bad.append(f"call {step} slot {slot}")
    return bad


def late_reader(rank: int, world: int) -> list[str]:
    """The last rank copies its rows out late. Another rank is the source of the next call, and must not overwrite them."""
    name, bad = fresh(world), []
    with reset():
        settings.configure(step_timeout_s=20.0)
        for step in range(6):
            source = step % (world - 1)
            matrix = [[30_000 if (s, d) == (source, world - 1) else 0 for d in range(world)] for s in range(world)]
            given = sides(rank, matrix, (4,), torch.float32, step)
            token = start(name, *given[:3], one_area=True)
            C.testing.set_random_delay(20_000 if rank == world - 1 else 0, step)
            if not same(finish(name, token, *given[:3], one_area=True), given[3]):
                bad.append(f"call {step}")
    return bad


def memory(rank: int, world: int) -> dict[str, int]:
    """Return the landing memory of a slot after an exchange of a ring's step: with one area, and with one for each source."""
    rows = 1 << 17  # of 16 bytes: 2 MiB
    matrix = [[rows if d == (s + 1) % world else 0 for d in range(world)] for s in range(world)]
    found = {}
    for slot, one_area in ((0, True), (1, False)):
        name = fresh(world)
        given = sides(rank, matrix, (4,))
        assert same(exchange(name, *given[:3], slot, one_area=one_area), given[3])
        found[str(one_area)] = area_bytes(name, slot)
    return found


def shared_slot(rank: int, world: int) -> list[int]:
    """Return the landing memory of a slot after each of 32 calls: large steps of a ring, and small pieces for all ranks, which
    open the windows in which areas grow."""
    name, found = fresh(world), []
    ring = [[1 << 18 if d == (s + 1) % world else 0 for d in range(world)] for s in range(world)]  # 4 MiB
    for call in range(32):
        is_ring = call % 4 != 0
        given = sides(rank, ring if is_ring else [[64] * world] * world, (4,))
        options: dict[str, Any] = {"site": "/ring", "one_area": True} if is_ring else {}
        assert same(exchange(name, *given[:3], 0, **options), given[3])
        found.append(area_bytes(name, 0))
    return found


def misuse(rank: int, world: int, strategy: str) -> list[dict[str, Any]]:
    """Return the errors of rows for several peers, and from several. The group works afterwards."""
    name = fresh(world)
    sent, out, of, want = sides(rank, sample_matrices(world)["ring"])
    several = sides(rank, sample_matrices(world)["equal"])[:3]
    options: dict[str, Any] = {"strategy": strategy, "one_area": True}
    found = [
        attempt(lambda: exchange(name, *several, **options)),
        attempt(lambda: exchange(name, sent, several[1], of, **options)),
    ]
    return [*found, {"error": "" if same(exchange(name, sent, out, of, **options), want) else "wrong"}]


def disagrees(rank: int, world: int) -> dict[str, Any]:
    """The last rank has an area for each source, the others have one."""
    name = fresh(world)
    with reset():
        settings.configure(step_timeout_s=20.0)
        given = sides(rank, sample_matrices(world)["ring"])[:3]
        return attempt(lambda: exchange(name, *given, one_area=rank != world - 1))
