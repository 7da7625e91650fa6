"""Rank functions of test_all_to_all.py: exchanges of pieces of any sizes."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ub_overlap
from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.schedule.encode import COPY, WAIT
from ub_overlap.runtime.schedule.encode import provide as proven
from ub_overlap.runtime.schedule.steps import SLOTS, SPLIT_SLOTS, FlagKind
from ub_overlap.runtime.session.bind import find_session

from . import rank_ops
from .rank_failures import attempt, fresh
from .rank_sessions import OPS, C, reset
from .rank_split import COPY_QUEUE

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
Matrix = list[list[int]]
"""Rows that rank s sends to rank d: matrix[s][d]."""


def piece(source: int, to: int, rows: int, width: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return the rows that `source` sends to rank `to`: all ranks can compute them."""
    made = torch.Generator().manual_seed(1000 * seed + 50 * source + to)
    return torch.randint(0, 256, (rows, *width), generator=made).to(dtype)


def sides(rank: int, matrix: Matrix, width: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return input, output splits, input splits and the expected result of this rank."""
    ranks = range(len(matrix))
    sent = torch.cat([piece(rank, to, matrix[rank][to], width, dtype, seed) for to in ranks])
    want = torch.cat([piece(source, rank, matrix[source][rank], width, dtype, seed) for source in ranks])
    return sent, [matrix[source][rank] for source in ranks], matrix[rank], want


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal in bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def start(name: str, sent: Tensor, out: list[int], of: list[int], slot: int = 0, **options: Any) -> Tensor:
    return OPS.start_all_to_all(sent, out, of, *tail(name, slot, options))


def finish(name: str, token: Tensor, sent: Tensor, out: list[int], of: list[int], slot: int = 0, **options: Any) -> Tensor:
    return OPS.finish_all_to_all(token, sent, out, of, *tail(name, slot, options), order=options.get("order"))


def tail(name: str, slot: int, options: dict[str, Any]) -> tuple[Any, ...]:
    one_area = options.get("one_area", False)
    return slot, one_area, options.get("strategy", "bulk"), name, options.get("site", f"/exchange.{slot}")


def exchange(name: str, sent: Tensor, out: list[int], of: list[int], slot: int = 0, **options: Any) -> Tensor:
    """Start and finish."""
    return finish(name, start(name, sent, out, of, slot, **options), sent, out, of, slot, **options)


def sample_matrices(world: int) -> dict[str, Matrix]:
    """Return equal, uneven and zero-sized pieces: a ring's permutation, all rows to one rank, nothing at all."""
    ranks = range(world)
    return {
        "equal": [[2] * world for _ in ranks],
        "uneven": [[3 * s + d for d in ranks] for s in ranks],
        "ring": [[4 if d == (s + 1) % world else 0 for d in ranks] for s in ranks],
        "to one": [[5 if d == 0 else 0 for d in ranks] for s in ranks],
        "own": [[6 if d == s else 0 for d in ranks] for s in ranks],
        "one silent": [[0 if world - 1 in (s, d) else 2 for d in ranks] for s in ranks],
        "nothing": [[0] * world for _ in ranks],
    }


def values(rank: int, world: int, strategy: str) -> list[str]:
    """Return what differs in bits, over pieces, dtypes and shapes of rows."""
    name, bad = rank_ops.group(), []
    for label, matrix in sample_matrices(world).items():
        for dtype in DTYPES if label == "uneven" else (torch.bfloat16,):
            sent, out, of, want = sides(rank, matrix, dtype=dtype)
            if not same(exchange(name, sent, out, of, strategy=strategy), want):
                bad.append(f"{label} {dtype}")
    for width in ((), (2, 5), (0,), (1, 7, 1)):
        sent, out, of, want = sides(rank, sample_matrices(world)["uneven"], width)
        if not same(exchange(name, sent, out, of, strategy=strategy), want):
            bad.append(f"rows of {width}")
    sent, out, of, want = sides(rank, sample_matrices(world)["equal"])
    strided = sent.t().contiguous().t()
    if not same(exchange(name, strided, out, of, strategy=strategy), want):
        bad.append("strided")
    sent, out, of, want = sides(rank, sample_matrices(world)["equal"], (1,))
    column = sent.as_strided(sent.shape, (1, 2 * world))  # contiguous, and its last stride is not 1
    if not same(exchange(name, column, out, of, strategy=strategy), want):
        bad.append("column")
    return bad


def random_program(rank: int, world: int, times: int, seed: int, strategy: str) -> list[str]:
    """Start and finish exchanges in up to three slots in a random order, with gathers between."""
    name, order, bad = rank_ops.group(), random.Random(seed), []
    opened: dict[int, tuple[Any, ...]] = {}

    def end(slot: int) -> None:
        token, sent, out, of, want = opened.pop(slot)
        if not same(finish(name, token, sent, out, of, slot, strategy=strategy), want):
            bad.append(f"slot {slot} at step {step}")

    for step in range(times):
        slot = order.randrange(3)
        limit = order.choice((1, 4, 40))
        matrix = [[order.randrange(limit) for _ in range(world)] for _ in range(world)]
        if slot in opened:
            end(slot)
        elif order.random() < 0.2:
            whole = OPS.bulk(torch.full((2,), float(rank)), [], [], "all_gather", "sum", torch.float32, "bulk", name, "/b")[0]
            bad += [] if whole.tolist() == [float(r) for r in range(world) for _ in range(2)] else [f"gather at step {step}"]
        else:
            sent, out, of, want = sides(rank, matrix, (5,), order.choice((torch.float32, torch.int16)), step)
            opened[slot] = (start(name, sent, out, of, slot, strategy=strategy), sent, out, of, want)
    for slot in sorted(opened):
        end(slot)
    return bad[:5]


def handles(rank: int, world: int) -> list[str]:
    """The function for eager code: equal parts by default, two handles open at once."""
    name, bad = fresh(world), []
    sent, out, of, want = sides(rank, sample_matrices(world)["equal"])
    if not same(ub_overlap.all_to_all(sent, group=name), want):
        bad.append("equal parts")
    first = ub_overlap.all_to_all(sent, out, of, name, async_op=True, site="first")
    uneven = sides(rank, sample_matrices(world)["uneven"], dtype=torch.float16)
    second = ub_overlap.all_to_all(*uneven[:3], name, async_op=True, site="second")
    bad += [] if repr(second) == "<open all_to_all at site '/second'>" else [repr(second)]
    bad += [] if same(second.wait(), uneven[3]) and same(first.wait(), want) else ["handles"]
    return bad


def misuse(rank: int, world: int, strategy: str) -> list[dict[str, Any]]:
    """Return the errors of wrong calls. Nothing is sent, and the group works afterwards."""
    name = fresh(world)
    sent, out, of, want = sides(rank, sample_matrices(world)["equal"])
    options = {"strategy": strategy}
    found = [
        attempt(lambda: exchange(name, sent, out[1:], of, **options)),
        attempt(lambda: exchange(name, sent, out, [-1, *of[1:]], **options)),
        attempt(lambda: exchange(name, sent[1:], out, of, **options)),
        attempt(lambda: exchange(name, sent[0, 0], out, of, **options)),
        attempt(lambda: exchange(name, sent, out, of, SPLIT_SLOTS, **options)),
        attempt(lambda: exchange(name, sent, out, of, strategy="bulk:chunks=4")),
        attempt(lambda: finish(name, sent, sent, out, of, **options)),
    ]
    token = start(name, sent, out, of, **options)
    found.append(attempt(lambda: start(name, sent, out, of, **options)))
    found.append(attempt(lambda: finish(name, token, sent, [out[0] + 1, *out[1:]], of, **options)))
    good = same(finish(name, token, sent, out, of, **options), want)
    found += [
        attempt(lambda: ub_overlap.all_to_all(sent.clone().requires_grad_(), group=name)),
        attempt(lambda: ub_overlap.all_to_all(sent[1:], group=name)),
    ]
    return [*found, {"error": "" if good else "wrong"}]


def unbacked_fakes(rank: int, world: int) -> tuple[str, int, str]:
    """Return the sizes and the dtype of a result whose splits are unbacked."""
    name, environment = rank_ops.group(), ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        splits = [environment.create_unbacked_symint() for _ in range(world)]
        sent = torch.empty(8, 3, dtype=torch.bfloat16)
        token = start(name, sent, splits, [8 // world] * world)
        out = finish(name, token, sent, splits, [8 // world] * world)
        assert (token.shape, token.dtype) == ((1,), torch.uint8)
        order = torch.empty(environment.create_unbacked_symint(), dtype=torch.int64)
        assert finish(name, token, sent, splits, [8 // world] * world, order=order).shape == (order.shape[0], 3)
        same_size = torch.fx.experimental.symbolic_shapes.statically_known_true(out.shape[0] == sum(splits))
        return ("sum" if same_size else str(out.shape[0])), int(out.shape[1]), str(out.dtype)


def compiled(rank: int, world: int, inner: str) -> list[str]:
    """Trace counts of tokens to unbacked splits, two exchanges open at once, and a static one."""
    name = rank_ops.group()

    def step(x: Tensor, counts: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        received = OPS.start_all_to_all(counts, [1] * world, [1] * world, 0, False, "bulk", name, "/counts")
        theirs = OPS.finish_all_to_all(received, counts, [1] * world, [1] * world, 0, False, "bulk", name, "/counts")
        of, out = counts.tolist(), theirs.tolist()
        scaled = x * 2
        token = OPS.start_all_to_all(scaled, out, of, 0, False, "bulk", name, "/dispatch")
        second = OPS.start_all_to_all(weight, [2] * world, [2] * world, 1, False, "bulk", name, "/weights")
        hidden = weight @ weight.t()
        tokens = OPS.finish_all_to_all(token, scaled, out, of, 0, False, "bulk", name, "/dispatch")
        even = [2] * world
        return tokens + 1, OPS.finish_all_to_all(second, weight, even, even, 1, False, "bulk", name, "/weights") * hidden

    bad = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = torch.compile(step, backend=inner, fullgraph=True)
        for seed, label in enumerate(("uneven", "ring", "nothing")):
            matrix = sample_matrices(world)[label]
            x, _, of, want = sides(rank, matrix, seed=seed)
            weight = torch.randn(2 * world, 2 * world, generator=torch.Generator().manual_seed(rank))
            counts = torch.tensor(of)
            got, plain = graph(x, counts, weight), step(x, counts, weight)
            if not (same(got[0], want * 2 + 1) and same(plain[0], got[0]) and torch.allclose(got[1], plain[1])):
                bad.append(label)
    torch._dynamo.reset()
    return bad


def in_order(rank: int, world: int, function: str, *args: Any) -> Any:
    """Run a function on a group across hosts, which has no transport of ours."""
    from .rank_hosts import one_rank_a_host

    with one_rank_a_host(world):
        found = globals()[function](rank, world, *args)
        dist.barrier()
        return found


def area_bytes(name: str, slot: int = 0, device: str = "cpu") -> int:
    """Return the bytes of the landing memory of a split slot on this rank."""
    session = find_session(name, device)
    assert session is not None
    return int(session._arena.bytes_of_slot(SLOTS + slot))


def grows_and_rounds(rank: int, world: int) -> dict[str, Any]:
    """A site's pieces grow: they travel in rounds until all ranks grow the areas, at the same call. Others need one round.

    Return what is wrong, and the bytes of the slot after each call.
    """
    name, bad, sizes = fresh(world), [], []
    for step in range(26):
        rows = 3 if step < 4 else 300_000  # of 12 bytes: 27 rounds of the first areas
        matrix = [[rows if (s, d) == (0, world - 1) else step + s for d in range(world)] for s in range(world)]
        sent, out, of, want = sides(rank, matrix, (3,), torch.int32, step)
        if not same(exchange(name, sent, out, of), want):
            bad.append(f"call {step}")
        sizes.append(area_bytes(name))
    return {"bad": bad, "sizes": sizes, "grown": sum(a != b for a, b in zip([0, *sizes], sizes, strict=False))}


def first_calls_of_sites(rank: int, world: int) -> list[int]:
    """The first call of each site grows the areas to the largest piece of any rank. Return the bytes after each call."""
    name, sizes = fresh(world), []
    for site, rows in (("a", 10), ("b", 200_000), ("b", 200_000), ("c", 0), ("a", 10)):
        matrix = [[rows if (s, d) == (1, 0) else 1 for d in range(world)] for s in range(world)]
        sent, out, of, want = sides(rank, matrix, (3,), torch.int32)
        assert same(exchange(name, sent, out, of, site=f"/{site}"), want)
        sizes.append(area_bytes(name))
    return sizes


def delayed_rounds(rank: int, world: int, times: int) -> list[str]:
    """Exchange pieces of many rounds with random delays in all steps, in two slots, with gathers between."""
    name, order, bad = fresh(world), random.Random(world), []
    tiny = [[1] * world for _ in range(world)]
    for slot in (0, 1):
        exchange(name, *sides(rank, tiny)[:3], slot)
    with reset():
        C.testing.set_random_delay(200, 7 * rank)
        for step in range(times):
            matrix = [[order.choice((0, 1, 5_000, 40_000, 60_000)) for _ in range(world)] for _ in range(world)]
            first, second = (sides(rank, m, (4,), torch.float32, step) for m in (matrix, matrix[::-1]))
            tokens = [start(name, *given[:3], slot) for slot, given in enumerate((first, second))]
            OPS.bulk(torch.ones(2), [], [], "all_gather", "sum", torch.float32, "bulk", name, "/b")
            for slot, given in enumerate((first, second)):
                if not same(finish(name, tokens[slot], *given[:3], slot), given[3]):
                    bad.append(f"call {step} slot {slot}")
    return bad


def without_credits(rank: int, world: int, waits: bool) -> list[str]:
    """Rank 0 copies rounds out late. `waits`: keep the waits of rank 1 for READY2, else it overwrites rounds."""

    def provide(key: tuple[Any, ...], me: int) -> list[tuple[int, ...]]:
        rows = proven(key, me)
        if waits or key[0] != "split_all_to_all" or me == 0:
            return rows
        return [row for row in rows if not (row[0] == WAIT and row[1] == COPY_QUEUE and row[4] == FlagKind.READY2)]

    name, bad = fresh(world), []
    matrix = [[0, 0], [100_000, 0]]
    exchange(name, *sides(rank, [[1] * world] * world)[:3])
    C.set_provider(provide)
    try:
        with reset():
            settings.configure(step_timeout_s=3.0)
            late = max(i for i, row in enumerate(provide(("split_all_to_all", world, 2, (), 0, 0), rank)) if row[0] == COPY)
            C.testing.set_step_delays({late: 5_000}, only_rank=0)
            sent, out, of, want = sides(rank, matrix, (2,))
            if not same(exchange(name, sent, out, of), want):
                bad.append("overwritten")
    except errors.UbOverlapError as error:
        bad.append(type(error).__name__)
    finally:
        C.set_provider(ops.ScheduleProvider())
        dist.barrier()
    return bad


def disagrees(rank: int, world: int, step_s: float, late_s: float) -> dict[str, Any]:
    """The last rank expects more rows from rank 0 than that sends. It finishes late: the others are in their next call."""
    name = fresh(world)
    with reset():
        settings.configure(step_timeout_s=step_s)
        sent, out, of, _ = sides(rank, sample_matrices(world)["uneven"])
        exchange(name, sent, out, of)
        wrong = [out[0] + 1, *out[1:]] if rank == world - 1 else out
        token = start(name, sent, wrong, of)
        time.sleep(late_s if rank == world - 1 else 0)
        found = attempt(lambda: finish(name, token, sent, wrong, of))
        if late_s and rank != world - 1:
            found = attempt(lambda: exchange(name, sent, out, of))
        dist.barrier()
        return found


def stays_away(rank: int, world: int, step_s: float, how: str) -> dict[str, Any]:
    """The last rank never starts ("absent"), or it starts pieces of many rounds and then leaves, or ends ("dies")."""
    name = fresh(world)
    with reset():
        settings.configure(step_timeout_s=step_s)
        exchange(name, *sides(rank, [[1] * world] * world)[:3])
        sent, out, of, _ = sides(rank, [[1 if how == "absent" else 200_000] * world for _ in range(world)])
        found: dict[str, Any] = {}
        if rank != world - 1:
            found = attempt(lambda: exchange(name, sent, out, of))
        elif how != "absent":
            start(name, sent, out, of)
        if how == "dies":
            if rank == world - 1:
                os._exit(0)
            return found
        dist.barrier()
        return found


def is_at_a_new_site(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """The last rank starts at a site that is new, and asks for sizes. The others have started, and wait for nothing yet."""
    name = fresh(world)
    with reset():
        settings.configure(step_timeout_s=step_s)
        sent, out, of, _ = sides(rank, [[1] * world] * world)
        exchange(name, sent, out, of)
        token = None if rank == world - 1 else start(name, sent, out, of)
        dist.barrier()
        if token is None:
            found = attempt(lambda: start(name, sent, out, of, site="/new"))
        dist.barrier()
        if token is not None:
            found = attempt(lambda: finish(name, token, sent, out, of))
        return found


def traced_rounds(rank: int, world: int, rows: int) -> list[tuple[str, str, bool]]:
    """Return queue, kind and whether times are sound of the steps of a traced exchange, of `rows` in each piece."""
    name = fresh(world)
    exchange(name, *sides(rank, [[1] * world] * world)[:3], site="/traced")
    sent, out, of, want = sides(rank, [[rows] * world] * world)
    with reset():
        settings.configure(trace=True)
        begin = time.monotonic_ns()
        assert same(exchange(name, sent, out, of, site="/traced"), want)
        return [(queue, kind, begin <= b <= e) for _, queue, kind, b, e, _ in C.last_trace("/traced")]


def statistics(rank: int, world: int) -> dict[str, Any]:
    """Return statistics of an exchange that was pushed before its finish, its text in the flight recorder, and its steps."""
    name = fresh(world)
    sent, out, of, _ = sides(rank, [[64] * world for _ in range(world)], (16,))
    exchange(name, sent, out, of, site="/counted")
    with reset():
        settings.configure(trace=True)
        C.clear_stats()
        token = start(name, sent, out, of, site="/counted")
        time.sleep(0.5)
        finish(name, token, sent, out, of, site="/counted")
        stats = C.site_stats()["/counted"]
        trace = [(queue, kind) for _, queue, kind, *_ in C.last_trace("/counted")]
    shapes = ub_overlap.flight_record(name)[0]["records"][-1]["shapes"]
    return {**{key: stats[key] for key in ("calls", "bytes_copied", "bytes_overlapped")}, "shapes": shapes, "trace": trace}
