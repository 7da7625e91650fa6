"""Measure one row: build every column, compare ours with the plain result, time all, alternating."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import torch

from ub_overlap.runtime import settings
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.session import session
from ub_overlap.tools.rank_process import World, capture_graph

from ..timing import Clock, settle
from .case import Call, Case
from .collectives import RowCollectives
from .float8 import Float8Case
from .peers import PeerPushes
from .suite import SuiteRow

NEEDS_CUDA = "needs CUDA"
NEEDS_RANKS = "mirror: its ranks do not exist"
PLAIN = ("nccl", "seq", "seq_g", "torch", "torch_g")
"""Columns of plain collectives and of other libraries: they need all ranks of the group."""
BOUND = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Largest allowed difference from the plain result, ||a - b|| / ||b||. Both round to dtype, NCCL after every addition."""
WIRE_BOUND = 5e-2
"""The same on a float8 wire: e4m3 rounds by at most 2^-4 of a number, about 2.6% on average."""


def bound(name: str, dtype: torch.dtype) -> float:
    return WIRE_BOUND if "wire" in name else BOUND[dtype]


@dataclass
class OpContext:
    """Properties that all rows share. `group`: the c10d group of our ops; `new_group` makes another one of the same size."""

    world: World
    dtype: torch.dtype
    strategies: Sequence[str]
    columns: str
    iters: int
    warm: int
    peers: PeerPushes | None
    group: str
    collectives: RowCollectives
    new_group: Callable[[], str]
    searches_algorithms: bool = False
    """Choose the algorithms of our matmuls before they are timed as graphs. The other columns keep torch's."""

    @property
    def ranks(self) -> int:
        """Size of the group of our ops. In mirror mode more than the processes of `world`."""
        return self.collectives.ranks

    @property
    def is_mirror(self) -> bool:
        """Two processes stand for all ranks of the group."""
        return self.ranks != self.world.ranks


@dataclass
class Columns:
    """Calls and results by column, and the reason for a missing column."""

    calls: dict[str, Call] = field(default_factory=dict)
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


def measure(row: SuiteRow, context: OpContext) -> dict[str, Any]:
    """Return the row as JSON values: `ms`, `iqr`, `host_us`, `error` by column, and `why` for columns without a time."""
    world, ranks = context.world, context.ranks
    record: dict[str, Any] = {**vars(row), "ranks": ranks, "bytes": row.shard_bytes(ranks) * (ranks - 1)}
    if uneven := row.why_not(ranks):
        return {**record, "ms": {}, "why": {"*": uneven}}
    case = (Float8Case if row.fp8 else Case)(row, world, context.dtype, context.collectives)
    settle(case.gemm, world, 0.2 if world.cuda else 0.0)
    columns = Columns()
    eager = _build(case, context, columns)
    wrong = _errors(case, columns, world)
    for name, error in wrong.items():
        if name.startswith("ours") and not error <= bound(name, context.dtype):
            columns.calls.pop(name)
            eager.pop(name, None)
            columns.why[name] = f"wrong numbers: differs from seq by {error:.3g} of its norm"
    settle(case.gemm, world, 0.05 if world.cuda else 0.0)
    clock = Clock(world, context.peers.together if context.peers else None)
    ms, iqr = clock.rounds(columns.calls, context.iters, context.warm)
    host = clock.host(eager, 20 if world.cuda else 3)
    after = _errors(case, columns, world)  # calls alternated back to back: their results must still be correct
    for name, error in after.items():
        if name.startswith("ours") and not error <= bound(name, context.dtype) and name in ms:
            del ms[name]
            columns.why[name] = f"wrong numbers after timing: differs from seq by {error:.3g} of its norm"
    if world.cuda:
        session.check(context.group)
        if not case.gather and "ours pipelined" in ms:
            record["reduce_gbs"] = _reduce_rate(case, context)
    return {**record, "ms": ms, "iqr": iqr, "host_us": host, "error": wrong, "why": columns.why}


def _build(case: Case, context: OpContext, columns: Columns) -> dict[str, Call]:
    """Fill `columns`. Return the eager calls whose host time is measured."""
    world, peers, size = context.world, context.peers, case.row.shard_bytes(context.ranks)
    eager: dict[str, Call] = {}

    def add(name: str, make: Callable[[], Call], graph: bool, cuda_only: bool = False) -> None:
        if not any(fnmatchcase(name, p) for p in context.columns.split(",")):
            return
        if context.is_mirror and name in PLAIN:
            columns.why[name] = NEEDS_RANKS
            return
        if not world.cuda and (cuda_only or name.endswith("_g") or name.startswith("ours_g")):
            columns.why[name] = NEEDS_CUDA
            return

        def ready() -> tuple[Call, Any]:
            call = make()
            out = call()
            world.sync()
            if name.startswith("ours"):
                _require_overlap(context)
            return capture_graph(call, world) if graph and world.cuda else (call, out)

        world.barrier()
        made, why = world.agreed(ready)
        if why:
            columns.why[name] = why
            if name.startswith("ours"):
                _replace_poisoned_group(context, columns)
            return
        columns.calls[name], out = made
        if name in ("seq", "seq_g", "torch", "torch_g") or name.startswith("ours"):
            columns.results[name] = out

    add("gemm", lambda: case.gemm, True)
    add("nccl", lambda: case.collective, True)
    add("push", lambda: _required(peers).push(size), True, cuda_only=True)
    add("B", lambda: _required(peers).with_push(case.gemm, size), True, cuda_only=True)
    add("seq", lambda: case.seq, False)
    add("seq_g", lambda: case.seq, True)
    add("torch", lambda: case.torch_fused, False, cuda_only=True)
    add("torch_g", lambda: case.torch_fused, True, cuda_only=True)
    has_direct, has_stripes = not case.gather and not case.row.fp8, not case.gather
    strategies = [s for s in context.strategies if has_stripes or "stripes" not in s]
    strategies = [s for s in strategies if has_direct or s != "direct"]
    for strategy in strategies:  # eager columns first: growth of the group's memory would invalidate graphs
        add(f"ours {strategy}", lambda s=strategy: case.ours(s, context.group), False)
    if context.searches_algorithms:
        _search_algorithms(world, [call for name, call in columns.calls.items() if name.startswith("ours ")])
    for strategy in strategies:
        add(f"ours_g {strategy}", lambda s=strategy: case.ours(s, context.group), True)
        if strategy.startswith("pipelined") and "stripes" not in strategy:  # others are one batched matmul, or several
            _cuts(case, strategy, add)
    if case.gather:
        add("ours_g keep", lambda: case.ours(strategies[0], context.group, keep=True), True)
        add("ours_g keep:engine", lambda: case.ours("pipelined:copies=engine", context.group, keep=True), True)
    for name, make in case.variants(strategies, context.group).items():
        add(name, make, True)
    for name in ("seq", "torch", *(f"ours {s}" for s in strategies)):
        if name in columns.calls:
            eager[name] = columns.calls[name]
    return eager


def _search_algorithms(world: World, calls: Sequence[Call]) -> None:
    """Choose the algorithms of the calls' matmuls, on all ranks. They hold for this process only."""
    from ub_overlap.runtime.matmul_algorithms import gpu, tuning

    device = gpu.MatmulGpu()
    for call in calls:
        chosen = tuning.tune_call(device, device.device, device.library(), call, world.gather, write=False)
        for row in chosen.values():
            if row.us < row.first_us:
                world.say(f"  {row}")


def _reduce_rate(case: Case, context: OpContext) -> float | None:
    """Return GB/s of the kernel that sums the received shards, bytes read and written, by its time stamps; slowest rank."""
    call, site, rates = case.ours("pipelined", context.group), case.site("pipelined"), []
    before = settings.current().trace
    settings.configure(trace=True)
    for _ in range(5):
        call()
        context.world.sync()
        spans = [end - begin for _, _, kind, begin, end, _ in extension().last_trace(site) if kind == "reduce"]
        moved = case.row.shard_bytes(context.ranks) * (context.ranks + 1)
        rates.append(moved / sum(spans) if spans and sum(spans) else 0.0)
    settings.configure(trace=before)
    return -context.world.worst([-median(rates)])[0] or None


def _require_overlap(context: OpContext) -> None:
    """Raise RuntimeError if our op uses the c10d fallback: its time would be that of `seq`."""
    if context.world.cuda:
        session.check(context.group)
    for core in extension().sessions():
        if core.group == context.group and core.transport == "c10d":
            raise RuntimeError(f"group without transport: {core.reason}")


def _replace_poisoned_group(context: OpContext, columns: Columns) -> None:
    """Replace the group if a failure made it unusable, and drop the columns that use it.

    Its session is not closed: captured graphs still use its memory."""
    _, why = context.world.agreed(lambda: session.check(context.group))
    if why:
        for name in [name for name in columns.calls if name.startswith("ours")]:
            del columns.calls[name]
            columns.why[name] = f"the group failed: {why}"
        context.group = context.new_group()


def _cuts(case: Case, strategy: str, add: Callable[..., None]) -> None:
    """Add the columns "cut S" (the matmul alone in the pieces of strategy S) and "last S" (the piece that no transfer hides).

    AG: the last piece waits for the last push. RS: the first push waits for the first piece."""

    def rows() -> list[int]:
        pieces = case.pieces(strategy)
        if not pieces:
            raise ValueError(f"{case.row.M} rows do not divide evenly")
        return pieces

    add(f"cut {strategy}", lambda: case.cut(rows()), True)
    add(f"last {strategy}", lambda: case.cut([rows()[-1 if case.gather else 0]]), True)


def _required(peers: PeerPushes | None) -> PeerPushes:
    assert peers is not None, "columns of pushes need CUDA"
    return peers


def _errors(case: Case, columns: Columns, world: World) -> dict[str, float]:
    """Return ||a - b|| / ||b|| of each column against a new plain result, maximum over ranks; NaN counts as 1e9.

    Inputs are new each time, so stale results do not pass. Results are filled with NaN before: a graph writes the same tensor
    again, an eager call gets memory that held NaN.
    """
    case.refresh()
    plain = case.seq().clone().float()
    norm = plain.norm()
    mine: list[float] = []
    for name, result in columns.results.items():
        if name not in columns.calls:
            mine.append(0.0)
            continue
        result.fill_(float("nan"))
        torch.full_like(result, float("nan"))  # freed at once: the next eager allocation
        again = columns.calls[name]()
        got = result if again is None else again
        error = ((got.float() - plain).norm() / norm).item()
        mine.append(error if error == error else 1e9)
    return dict(zip(columns.results, world.worst(mine), strict=True))
