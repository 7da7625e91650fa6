"""One row: build every column, check ours against the plain way, time all in turns."""

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
from ub_overlap.tools.rank_process import World

from ..timing import Clock, graphed, settle
from .case import Call, Case
from .float8 import Float8Case
from .peers import PeerPushes
from .suite import SuiteRow

NEEDS_CUDA = "needs CUDA"
BOUND = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Most that ours may differ from the plain way, ||a - b|| / ||b||: both round to dtype, NCCL after every addition."""
WIRE_BOUND = 5e-2
"""The same on a float8 wire: e4m3 rounds by 2^-4 of a number at most, by about 2.6% on average."""


def bound(name: str, dtype: torch.dtype) -> float:
    return WIRE_BOUND if "wire" in name else BOUND[dtype]


@dataclass
class OpContext:
    """What all rows share. `group`: the c10d group of our ops."""

    world: World
    dtype: torch.dtype
    strategies: Sequence[str]
    columns: str
    iters: int
    warm: int
    peers: PeerPushes | None
    group: str


@dataclass
class Columns:
    """Calls by column, their results, and why a column has none."""

    calls: dict[str, Call] = field(default_factory=dict)
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


def measure(row: SuiteRow, setting: OpContext) -> dict[str, Any]:
    """The row as JSON values: `ms`, `iqr`, `host_us` and `error` by column, and `why` for each column without a time."""
    world = setting.world
    found: dict[str, Any] = {**vars(row), "ranks": world.ranks, "bytes": row.shard_bytes(world.ranks) * (world.ranks - 1)}
    if uneven := row.why_not(world.ranks):
        return {**found, "ms": {}, "why": {"*": uneven}}
    case = (Float8Case if row.fp8 else Case)(row, world, setting.dtype)
    settle(case.gemm, world, 0.2 if world.cuda else 0.0)
    columns = Columns()
    eager = _build(case, setting, columns)
    wrong = _errors(case, columns, world)
    for name, error in wrong.items():
        if name.startswith("ours") and not error <= bound(name, setting.dtype):
            columns.calls.pop(name)
            eager.pop(name, None)
            columns.why[name] = f"wrong numbers: differs from seq by {error:.3g} of its norm"
    settle(case.gemm, world, 0.05 if world.cuda else 0.0)
    clock = Clock(world, setting.peers.together if setting.peers else None)
    ms, iqr = clock.rounds(columns.calls, setting.iters, setting.warm)
    host = clock.host(eager, 20 if world.cuda else 3)
    after = _errors(case, columns, world)  # the calls took turns back to back: their results must still be right
    for name, error in after.items():
        if name.startswith("ours") and not error <= bound(name, setting.dtype) and name in ms:
            del ms[name]
            columns.why[name] = f"wrong numbers after timing: differs from seq by {error:.3g} of its norm"
    if world.cuda:
        session.check(setting.group)
        if not case.gather and "ours pipelined" in ms:
            found["reduce_gbs"] = _reduce_rate(case, setting)
    return {**found, "ms": ms, "iqr": iqr, "host_us": host, "error": wrong, "why": columns.why}


def _build(case: Case, setting: OpContext, columns: Columns) -> dict[str, Call]:
    """Fill `columns`; returns the eager calls whose host time matters."""
    world, peers, size = setting.world, setting.peers, case.row.shard_bytes(setting.world.ranks)
    eager: dict[str, Call] = {}

    def add(name: str, make: Callable[[], Call], graph: bool, cuda_only: bool = False) -> None:
        if not any(fnmatchcase(name, p) for p in setting.columns.split(",")):
            return
        if not world.cuda and (cuda_only or name.endswith("_g") or name.startswith("ours_g")):
            columns.why[name] = NEEDS_CUDA
            return

        def ready() -> tuple[Call, Any]:
            call = make()
            out = call()
            world.sync()
            if name.startswith("ours"):
                _really_ours(setting)
            return graphed(call, world) if graph and world.cuda else (call, out)

        world.barrier()
        made, why = world.agreed(ready)
        if why:
            columns.why[name] = why
            if name.startswith("ours"):
                _leave_poisoned(setting, columns)
            return
        columns.calls[name], out = made
        if name in ("seq", "seq_g", "torch", "torch_g") or name.startswith("ours"):
            columns.results[name] = out

    add("gemm", lambda: case.gemm, True)
    add("nccl", lambda: case.collective, True)
    add("push", lambda: _with(peers).push(size), True, cuda_only=True)
    add("B", lambda: _with(peers).beside(case.gemm, size), True, cuda_only=True)
    add("seq", lambda: case.seq, False)
    add("seq_g", lambda: case.seq, True)
    add("torch", lambda: case.torch_fused, False, cuda_only=True)
    add("torch_g", lambda: case.torch_fused, True, cuda_only=True)
    strategies = [s for s in setting.strategies if not (case.gather and "stripes" in s)]
    for strategy in strategies:  # all eager ones first: the group's memory may grow, which no graph outlives
        add(f"ours {strategy}", lambda s=strategy: case.ours(s, setting.group), False)
    for strategy in strategies:
        add(f"ours_g {strategy}", lambda s=strategy: case.ours(s, setting.group), True)
        if "stripes" not in strategy:  # their pieces are one batched matmul
            _cuts(case, strategy, add)
    if case.gather:
        add("ours_g keep", lambda: case.ours(strategies[0], setting.group, keep=True), True)
    for name, make in case.variants(strategies, setting.group).items():
        add(name, make, True)
    for name in ("seq", "torch", *(f"ours {s}" for s in strategies)):
        if name in columns.calls:
            eager[name] = columns.calls[name]
    return eager


def _reduce_rate(case: Case, setting: OpContext) -> float | None:
    """GB/s of the kernel that sums what has landed, bytes read and written, by its own time stamps; the slowest rank's."""
    call, site, rates = case.ours("pipelined", setting.group), case.site("pipelined"), []
    before = settings.current().trace
    settings.configure(trace=True)
    for _ in range(5):
        call()
        setting.world.sync()
        spans = [end - begin for _, _, kind, begin, end, _ in extension().last_trace(site) if kind == "reduce"]
        moved = case.row.shard_bytes(setting.world.ranks) * (setting.world.ranks + 1)
        rates.append(moved / sum(spans) if spans and sum(spans) else 0.0)
    settings.configure(trace=before)
    return -setting.world.worst([-median(rates)])[0] or None


def _really_ours(setting: OpContext) -> None:
    """RuntimeError where our op fell back to the plain collective: its time would be seq's under another name."""
    if setting.world.cuda:
        session.check(setting.group)
    for core in extension().sessions():
        if core.group == setting.group and core.transport == "c10d":
            raise RuntimeError(f"group without transport: {core.reason}")


def _leave_poisoned(setting: OpContext, columns: Columns) -> None:
    """After a failure of ours: where it cost the group, go on with another one, without the columns that used the old one.

    Its session is not closed: graphs that were captured with it still name its memory."""
    _, why = setting.world.agreed(lambda: session.check(setting.group))
    if why:
        for name in [name for name in columns.calls if name.startswith("ours")]:
            del columns.calls[name]
            columns.why[name] = f"the group failed: {why}"
        setting.group = setting.world.new_group()


def _cuts(case: Case, strategy: str, add: Callable[..., None]) -> None:
    """cut S: the matmul alone in the pieces of strategy S; last S: the piece that no transfer can hide (AG: what waits for
    the last push; RS: what the first push waits for)."""

    def rows() -> list[int]:
        found = case.pieces(strategy)
        if not found:
            raise ValueError(f"{case.row.M} rows are not cut evenly")
        return found

    add(f"cut {strategy}", lambda: case.cut(rows()), True)
    add(f"last {strategy}", lambda: case.cut([rows()[-1 if case.gather else 0]]), True)


def _with(peers: PeerPushes | None) -> PeerPushes:
    assert peers is not None, "columns of pushes need CUDA"
    return peers


def _errors(case: Case, columns: Columns, world: World) -> dict[str, float]:
    """||a - b|| / ||b|| of every column's result against a fresh plain result, the worst rank's; NaN counts as 1e9.

    Inputs are new each time, so that what an earlier call left does not pass for a result. Results are filled with NaN
    before: a graph writes the same tensor again; an eager call gets memory that held NaN.
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
        torch.full_like(result, float("nan"))  # freed at once: what an eager call allocates next
        again = columns.calls[name]()
        got = result if again is None else again
        error = ((got.float() - plain).norm() / norm).item()
        mine.append(error if error == error else 1e9)
    return dict(zip(columns.results, world.worst(mine), strict=True))
