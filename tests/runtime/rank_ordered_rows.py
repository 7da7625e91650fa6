"""Rank functions of test_all_to_all.py: results that have the received rows in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from ub_overlap.runtime import errors
from ub_overlap.runtime.schedule.steps import SPLIT_SLOTS

from .rank_all_to_all import area_bytes, exchange, finish, same, sample_matrices, sides, start
from .rank_failures import fresh


def sample_orders(rows: int, seed: int) -> dict[str, Tensor]:
    """Return numbers of rows: all in another order, some, some several times, counted from the end, none."""
    made = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(rows, generator=made)
    twice = torch.cat([shuffled, shuffled])
    return {
        "all": shuffled,
        "some": shuffled[::2],
        "twice": twice,
        "from the end": shuffled - rows,
        "none": shuffled[:0],
        "strided": torch.stack([shuffled, shuffled], 1)[:, 0],
    }


def in_other_orders(rank: int, world: int, strategy: str, rows: int) -> list[str]:
    """Return what differs in bits where the result has the received rows in another order.

    `rows`: added to each piece of a second exchange of a site, whose areas are those of the first, so it has rounds.
    """
    name = fresh(world)
    bad, has_rounds = ordered_exchanges(name, rank, world, strategy, rows, torch.device("cpu"))
    return bad if has_rounds == (rows > 0) else [*bad, f"rounds: {has_rounds}"]


def ordered_exchanges(
    name: str, rank: int, world: int, strategy: str, rows: int, device: torch.device
) -> tuple[list[str], bool]:
    """Return what differs, and whether a piece had several rounds. The slot is one whose areas no other test has grown."""
    bad, has_rounds, slot = [], False, SPLIT_SLOTS - 5
    for label, matrix in sample_matrices(world).items():
        for dtype, width in ((torch.bfloat16, (3,)), (torch.float32, (2, 8)), (torch.int8, ()), (torch.float64, (0,))):
            site = f"/ordered.{label}.{dtype}"
            for extra in (0, rows) if rows else (0,):
                larger = [[n + extra if n else 0 for n in row] for row in matrix]
                sent, out, of, want = sides(rank, larger, width, dtype)
                for kind, order in sample_orders(sum(out), rank).items():
                    options = {"strategy": strategy, "site": site, "order": order.to(device)}
                    if not same(exchange(name, sent.to(device), out, of, slot, **options).cpu(), want[order]):
                        bad.append(f"{label} {dtype} {width} +{extra} {kind}")
                    largest = max(n for s, row in enumerate(larger) for d, n in enumerate(row) if s != d)
                    row_bytes = sent.element_size() * sent.shape[1:].numel()
                    has_rounds |= strategy == "bulk" and largest * row_bytes > area_bytes(name, slot, device.type) // world
    return bad, has_rounds


def wrong_orders(rank: int, world: int, strategy: str) -> list[str]:
    """Return the errors of orders that are none, on rank 0 only. With a wrong number the finish has ended all the same."""
    name, found = fresh(world), []
    sent, out, of, want = sides(rank, sample_matrices(world)["equal"])
    rows, zeros = sum(out), torch.zeros(2, dtype=torch.int64)
    right = torch.arange(rows - 1, -1, -1)

    def attempt_with(token: Tensor, order: Tensor) -> bool:
        try:
            return same(finish(name, token, sent, out, of, strategy=strategy, order=order), want[order])
        except (IndexError, errors.OptionError) as error:
            found.append(f"{type(error).__name__}: {error}")
            return rank == 0

    good = []
    for wrong in (rows, -rows - 1):
        token = start(name, sent, out, of, strategy=strategy)
        good.append(attempt_with(token, torch.tensor([0, wrong]) if rank == 0 else right))
    token = start(name, sent, out, of, strategy=strategy)
    for order in (zeros.int(), zeros[None, :1]):
        good.append(rank != 0 or attempt_with(token, order))
    return [*found, "" if all(good) and attempt_with(token, right) else "wrong"]
