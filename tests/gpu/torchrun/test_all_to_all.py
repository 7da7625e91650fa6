"""all_to_all: uneven and empty pieces, rounds, growth, delays of single ranks, static splits in a CUDA graph; bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.lockstep import Lockstep
from tests.runtime.rank_all_to_all import DTYPES, exchange, finish, same, sample_matrices, sides, start
from tests.runtime.rank_one_area import permutation
from tests.runtime.rank_ordered_rows import ordered_exchanges
from ub_overlap.runtime.session import session


def on_device(lockstep: Lockstep, *args: Any, **options: Any) -> Any:
    """Return input, splits and result of this rank, its tensors on the device."""
    sent, out, of, want = sides(lockstep.rank, *args, **options)
    return sent.to(lockstep.device), out, of, want


def all_pieces(lockstep: Lockstep, group: str) -> str:
    bad, count = [], 0
    for label, matrix in sample_matrices(lockstep.ranks).items():
        for dtype in DTYPES if label == "uneven" else (torch.bfloat16,):
            for width in ((3,), (), (2, 64)):
                sent, out, of, want = on_device(lockstep, matrix, width, dtype)
                site = f"/pieces.{label}.{dtype}.{width}"
                count += 1
                if not same(exchange(group, sent, out, of, site=site).cpu(), want):
                    bad.append(site)
    session.check(group)
    assert not bad, bad
    return f"{count} exchanges, bitwise"


def random_orders(lockstep: Lockstep, group: str, steps: int, rows: int, permutations: float = 0.0) -> str:
    """Start and finish in a random order, with pieces of up to `rows` rows. Single ranks are late.

    `permutations`: the share of exchanges that send all rows of a rank to one rank, with one landing area.
    """
    order, mine = lockstep.shared_random(5), lockstep.own_random(5)
    opened: dict[int, tuple[Any, ...]] = {}
    results = []

    def end(slot: int) -> None:
        options, token, sent, out, of, want = opened.pop(slot)
        results.append((finish(group, token, sent, out, of, slot, **options), want))

    for step in range(steps):
        slot = order.randrange(3)
        if mine.random() < 0.2:
            lockstep.sleep_on_device(mine.random() * 0.001)
        matrix = [[order.choice((0, 1, rows)) for _ in range(lockstep.ranks)] for _ in range(lockstep.ranks)]
        options: dict[str, Any] = {}
        if order.random() < permutations:
            matrix, options = permutation(lockstep.ranks, order, rows), {"one_area": True, "site": f"/step.{slot}"}
        if slot in opened:
            end(slot)
        sent, out, of, want = on_device(lockstep, matrix, (64,), torch.bfloat16, seed=step)
        opened[slot] = options, start(group, sent, out, of, slot, **options), sent, out, of, want
    for slot in sorted(opened):
        end(slot)
    lockstep.sync()
    session.check(group)
    wrong = [i for i, (got, want) in enumerate(results) if not same(got.cpu(), want)]
    assert not wrong, f"{len(wrong)} of {len(results)} results are wrong, the first {wrong[:5]}"
    return f"{len(results)} exchanges, bitwise"


def rounds(lockstep: Lockstep, group: str) -> str:
    """A site's pieces grow a thousandfold: they travel in rounds, then in areas that have grown."""
    for step in range(26):
        rows = 3 if step < 4 else 40_000
        matrix = [[rows] * lockstep.ranks for _ in range(lockstep.ranks)]
        sent, out, of, want = on_device(lockstep, matrix, (64,), torch.bfloat16, seed=step)
        got = exchange(group, sent, out, of, site="/rounds")
        assert same(got.cpu(), want), f"call {step}"
    session.check(group)
    return "26 exchanges, bitwise"


def replays(lockstep: Lockstep, group: str, turns: int, rows: int, has_order: bool = False) -> str:
    """Replay a graph with a static exchange, uneven ones too, and alternate with the same eagerly.

    `rows`: of the largest piece. The areas are small when the graph is captured: large pieces have rounds in it.
    `has_order`: the result has the rows in an order that differs from turn to turn.
    """
    if not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    ranks = range(lockstep.ranks)
    matrix = [[(s + 2 * d) % 3 * rows // 2 for d in ranks] for s in ranks]
    inputs = [on_device(lockstep, matrix, (128,), torch.bfloat16, seed=seed) for seed in range(3)]
    site = f"/graph.{rows}"
    if rows > 1000:
        first = on_device(lockstep, [[1] * lockstep.ranks for _ in ranks], (128,), torch.bfloat16)
        exchange(group, *first[:3], 0, site=site)
    static, out, of, _ = inputs[0]
    static = static.clone()
    orders = [torch.randperm(sum(out), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    by = orders[0].to(lockstep.device)

    def step(x: torch.Tensor) -> torch.Tensor:
        token = start(group, x, out, of, 0, site=site)
        hidden = x.float().square().sum()
        rows = finish(group, token, x, out, of, 0, site=site, order=by if has_order else None)
        return rows + (hidden - hidden).to(x.dtype)

    step(static)
    lockstep.sync()
    lockstep.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step(static)
    lockstep.sync()
    lockstep.barrier()
    wrong = []
    for turn in range(turns):
        sent, _, _, want = inputs[turn % 3]
        if has_order:
            by.copy_(orders[turn % 3])
            want = want[orders[turn % 3]]
        if turn % 4 == 3:
            got = step(sent)
        else:
            static.copy_(sent)
            graph.replay()
            got = captured
        lockstep.sync()
        wrong += [turn] * (not same(got.cpu(), want))
    session.check(group)
    assert not wrong, f"{len(wrong)} of {turns} turns are wrong, the first {wrong[:5]}"
    del captured, graph
    return f"{turns} turns, bitwise"


def test_the_host_goes_on(lockstep: Lockstep, group: str) -> None:
    """A start and a finish of known sizes wait for nothing on the host: they return while the device is still busy."""
    if not lockstep.cuda:
        pytest.skip("on the CPU the host is the device")
    matrix = [[64] * lockstep.ranks for _ in range(lockstep.ranks)]
    sent, out, of, want = on_device(lockstep, matrix, (128,), torch.bfloat16)
    for _ in range(2):
        exchange(group, sent, out, of, site="/host")
    lockstep.sync()
    lockstep.barrier()
    lockstep.sleep_on_device(0.5)
    busy = torch.cuda.Event()
    busy.record()
    rows = finish(group, start(group, sent, out, of, 0, site="/host"), sent, out, of, 0, site="/host")
    has_gone_on = not busy.query()
    lockstep.sync()
    assert has_gone_on, "the host waited for the device"
    assert same(rows.cpu(), want)


def test_pieces(lockstep: Lockstep, group: str) -> None:
    lockstep.note(all_pieces(lockstep, group))


@pytest.mark.deadline(140)  # 8 ranks compute the pieces of all on the CPU
@pytest.mark.parametrize(("steps", "rows"), [(40, 7), (60, 30_000)])
def test_random_orders(lockstep: Lockstep, group: str, steps: int, rows: int) -> None:
    lockstep.note(random_orders(lockstep, group, steps, rows))


@pytest.mark.parametrize("rows", [7, 30_000])
def test_random_orders_with_one_area(lockstep: Lockstep, group: str, rows: int) -> None:
    lockstep.note(random_orders(lockstep, group, 40, rows, permutations=0.7))


def test_rounds(lockstep: Lockstep, group: str) -> None:
    lockstep.note(rounds(lockstep, group))


@pytest.mark.parametrize(("rows", "has_order"), [(64, False), (64, True), (60_000, False), (60_000, True)])
def test_replays(lockstep: Lockstep, group: str, rows: int, has_order: bool) -> None:
    lockstep.note(replays(lockstep, group, 40, rows, has_order))


@pytest.mark.parametrize("rows", [0, 30_000])
def test_rows_in_another_order(lockstep: Lockstep, group: str, rows: int) -> None:
    """Read where they have landed, or, with pieces of several rounds, from a copy."""
    bad, has_rounds = ordered_exchanges(group, lockstep.rank, lockstep.ranks, "bulk", rows, lockstep.device)
    session.check(group)
    assert not bad, bad
    assert has_rounds == (rows > 0)
