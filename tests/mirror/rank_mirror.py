"""Rank functions of test_executor.py and of tests/gpu/torchrun/test_mirror.py: every op on a mirrored group.

Each returns a list of errors. On GPUs the data is bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ub_overlap.runtime.ops as ops
from benchmarks.mirror.group import MirrorGroups
from tests.runtime import oracle
from tests.runtime.oracle import far
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.ops.fused_collective import NO_BRANCH
from ub_overlap.tools.rank_process import World

OPS = torch.ops.ub_overlap


def world_of(rank: int, processes: int) -> World:
    default: Any = dist.group.WORLD
    return World(rank, processes, torch.device("cpu"), default.group_name, dist.new_group(backend="gloo"))


@dataclass(frozen=True)
class Data:
    """Makes random numbers that depend on the seed only."""

    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def __call__(self, *sizes: int, seed: int) -> Tensor:
        return oracle.data(*sizes, seed=seed, dtype=self.dtype).to(self.device)


def shard_of(partial: Tensor, ranks: int, outer: int, last: bool, owner: int) -> Tensor:
    """Return the shard of `owner`: the oracle's sum of this partial product and of zeros."""
    return oracle.scattered([partial, *[torch.zeros_like(partial)] * (ranks - 1)], outer, last, owner)


def gathers(process: int, ranks: int, group: str, data: Data) -> list[str]:
    """Run gathers of several layouts and sizes. The slots grow with the third."""
    bad = []
    for number, (outer, m, q, last, strategy) in enumerate(
        [
            (1, 6, 8, False, "pipelined"),
            (3, 2, 5, True, "pipelined:chunks=1"),
            (2, 256, 64, False, "pipelined"),
            (1, 4, 4, False, f"pipelined:chunks={2 * ranks}"),
        ]
    ):
        shards = [data(outer * m, q, seed=number + 10 * p) for p in (process, *[1 - process] * (ranks - 1))]
        whole = oracle.gathered([s.double() for s in shards], outer, last)
        rhs = [data(whole.shape[0] if t else whole.shape[1], 3, seed=90) for t, _ in oracle.ALL_TRANSPOSES]
        flags = [list(flags) for flags in zip(*oracle.ALL_TRANSPOSES, strict=True)]
        kept, outs = OPS.all_gather_matmul(
            shards[0], rhs, *flags, 1 if last else outer, last, True, [], [], strategy, group, f"ag{number}"
        )
        bad += far(f"gather {number}", kept, whole, 1)
        for transpose, right, out in zip(oracle.ALL_TRANSPOSES, rhs, outs, strict=True):
            bad += far(f"gather {number} {transpose}", out, oracle.product(whole, right.double(), *transpose), right.shape[0])
    return bad


def reductions(process: int, ranks: int, group: str, data: Data) -> list[str]:
    """Run reduce_scatters and all_reduces of one and two terms, in pieces, in stripes and stored at their owners."""
    bad = []
    dtype = data.dtype
    for number, (terms, last, strategy) in enumerate(
        [
            (1, False, "pipelined"),
            (2, False, "pipelined:stripes=2"),
            (1, False, "direct"),
            (1, True, "pipelined"),
            (2, False, f"pipelined:chunks={2 * ranks}"),
        ]
    ):
        sizes = (6, 4 * ranks) if last else (6 * ranks, 4)
        operands = {
            p: [(data(sizes[0], 5, seed=70 * p + t), data(5, sizes[1], seed=31 * p + t)) for t in range(terms)] for p in (0, 1)
        }
        partials: dict[int, Tensor] = {
            p: torch.stack([a.double() @ b.double() for a, b in pairs]).sum(0) for p, pairs in operands.items()
        }
        mine, theirs = partials[process], partials[1 - process]

        def reduced(mine: Tensor = mine, theirs: Tensor = theirs, last: bool = last) -> Tensor:
            own = shard_of(mine, ranks, 1, last, 0)
            return own + sum(shard_of(theirs, ranks, 1, last, p) for p in range(1, ranks))

        lhs, rhs = map(list, zip(*operands[process], strict=True))
        out, _, _ = OPS.matmul_reduce_scatter(
            lhs, rhs, None, 1, last, "sum", dtype, False, "plain", [], [], strategy, group, f"rs{number}"
        )
        bad += far(f"scatter {number}", out, reduced(), 5 * terms * ranks)
        if not last:
            out, _, _ = OPS.matmul_all_reduce(lhs, rhs, None, "sum", dtype, False, [], [], strategy, group, f"ar{number}")
            want = torch.cat([reduced(), *[reduced(theirs, mine)] * (ranks - 1)])
            bad += far(f"reduce {number}", out, want, 5 * terms * ranks)
    return bad


def bulks(process: int, ranks: int, group: str, data: Data) -> list[str]:
    bad = []
    left, right = data(6, 5, seed=1), data(5, 4, seed=2)
    for number, collective in enumerate(("all_gather", "reduce_scatter", "all_reduce")):
        inputs = {p: data(2 * ranks, 3, seed=number + 10 * p) for p in (0, 1)}
        mine, theirs = (inputs[p].double() for p in (process, 1 - process))
        own = inputs[process]
        out, products = OPS.bulk(own, [left], [right], collective, "sum", own.dtype, "bulk", group, f"bulk{number}")
        first = shard_of(mine, ranks, 1, False, 0) + sum(shard_of(theirs, ranks, 1, False, p) for p in range(1, ranks))
        other = shard_of(theirs, ranks, 1, False, 0) + sum(shard_of(mine, ranks, 1, False, p) for p in range(1, ranks))
        want = {"all_gather": [mine, *[theirs] * (ranks - 1)], "reduce_scatter": [first]}
        bad += far(f"bulk {collective}", out, torch.cat(want.get(collective, [first, *[other] * (ranks - 1)])), ranks)
        bad += far(f"bulk {collective} product", products[0], left.double() @ right.double(), 5)
    return bad


def few_tokens(process: int, ranks: int, group: str, data: Data) -> list[str]:
    """Run fused collectives. The parts of a two-shot all_reduce have one of two values each: its blocks are cut, not rows."""
    bad = []
    no_norm = (None, "none", None, None, 1e-5, True, False, 0.0, None, 0.0, 0.0, False, data.dtype)
    rows, cols = 2 * ranks, 512
    inputs = {p: data(rows, cols, seed=40 + p) for p in (0, 1)}
    mine, theirs = (inputs[p].double() for p in (process, 1 - process))
    first = shard_of(mine, ranks, 1, False, 0) + sum(shard_of(theirs, ranks, 1, False, p) for p in range(1, ranks))
    wanted = {
        "all_gather": torch.cat([mine, *[theirs] * (ranks - 1)]),
        "reduce_scatter": first,
        "all_reduce": mine + (ranks - 1) * theirs,
    }
    for collective, want in wanted.items():
        args = (*NO_BRANCH, *no_norm, "one_shot", group, f"few {collective}")
        out = OPS.fused_collective(inputs[process], collective, "sum", *args)[0]
        bad += far(f"one_shot {collective}", out, want, ranks)
    if ranks & (ranks - 1):
        return bad  # blocks of other numbers of ranks have parts of unlike sizes
    values = [1.0 + process, 2.0 - process]
    own = torch.full((rows, cols), values[0], dtype=data.dtype, device=data.device)
    args = (*NO_BRANCH, *no_norm, "two_shot", group, "few two_shot")
    out = OPS.fused_collective(own, "all_reduce", "sum", *args)[0].float()
    sums = [values[p] + (ranks - 1) * values[1 - p] for p in (0, 1)]
    counts = [int((out == value).sum()) for value in sums]
    if counts != [own.numel() // ranks, own.numel() - own.numel() // ranks]:
        bad.append(f"two_shot: {counts} of {own.numel()} numbers are {sums}")
    return bad


KINDS: list[Callable[[int, int, str, Data], list[str]]] = [gathers, reductions, bulks, few_tokens]


def every_op(rank: int, processes: int, ranks: int) -> list[str]:
    """Run every op twice on a mirrored group of `ranks` ranks."""
    return run_every_op(world_of(rank, processes), ranks)


def run_every_op(world: World, ranks: int) -> list[str]:
    groups = MirrorGroups(world, ranks)
    try:
        group, data = groups.new_group(), Data(world.device)
        bad = [error for _ in range(2) for kind in KINDS for error in kind(world.rank, ranks, group, data)]
        (core,) = [core for core in extension().sessions() if core.group == group]
        core.check()
        if (core.rank, core.ranks, core.transport) != (0, ranks, "mirror"):
            bad.append(f"session of rank {core.rank} of {core.ranks} over {core.transport}")
        return bad
    finally:
        groups.close()


def real_group_after(rank: int, processes: int) -> list[str]:
    """Run a gather on a real group after a mirrored one was closed."""
    assert ops.DEFINITIONS
    shards = [oracle.data(4, 3, seed=r) for r in range(processes)]
    default: Any = dist.group.WORLD
    kept, _ = OPS.all_gather_matmul(shards[rank], [], [], [], 1, False, True, [], [], "pipelined", default.group_name, "after")
    return far("real group", kept, torch.cat(shards).double(), 1)


def hosts_of_a_mirror(rank: int, processes: int) -> tuple[str, ...]:
    """Name the groups of several hosts next to a mirrored group, and return the hosts of its ranks."""
    from ub_overlap.runtime import settings
    from ub_overlap.runtime.session.host_groups import name_host_groups
    from ub_overlap.runtime.session.host_layout import hosts_of

    groups = MirrorGroups(world_of(rank, processes), 4)
    try:
        group = groups.new_group()
        settings.configure(hosts="0,1")
        name_host_groups()
        return hosts_of(group)
    finally:
        settings.configure(hosts="")
        groups.close()


def lost_process(rank: int, processes: int) -> list[str]:
    """One process makes no second call: the other one reports it within the deadline, and the ranks that it stands for."""
    from ub_overlap.runtime import errors, settings

    groups = MirrorGroups(world_of(rank, processes), 4)
    before = settings.current().step_timeout_s
    settings.configure(step_timeout_s=1)
    try:
        group = groups.new_group()
        shard = oracle.data(4, 3, seed=rank)
        for number in range(1 + (rank == 0)):
            try:
                OPS.all_gather_matmul(shard, [], [], [], 1, False, True, [], [], "pipelined", group, "lost")
            except errors.PeerTimeoutError as error:
                return [str(error)]
            assert number == 0, "the second call ended"
        dist.barrier()
        return []
    finally:
        settings.configure(step_timeout_s=before)
        if rank == 0:
            dist.barrier()
        groups.close()
