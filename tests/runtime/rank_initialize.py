"""Rank functions of test_initialize.py and test_watchdog.py."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ub_overlap
from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.schedule.steps import SLOTS
from ub_overlap.runtime.session import bind, session, symm_mem, watchdog

from .rank_sessions import gather, reset, scatter

C = ops.extension()
MIB = 1 << 20


def new_group(world: int) -> str:
    return str(dist.new_group(list(range(world))).group_name)


@contextlib.contextmanager
def logged(name: str = "ub_overlap.runtime.session", level: int = logging.INFO) -> Iterator[list[str]]:
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def bound(name: str) -> session.Session:
    found = bind.find_session(name, "cpu")
    assert found is not None
    return found


def ahead(rank: int, world: int) -> dict[str, Any]:
    """Reserve space for [4096, 64] float32, then run calls of every kind up to that size."""
    name, rows = new_group(world), 4096 // world
    with logged() as lines:
        slot = ub_overlap.initialize_group(name, (4096, 64), torch.float32)
        bad = gather(name, rank, world, rows, cols=64) + scatter(name, rank, world, rows)
        bad += gather(name, rank, world, 3, cols=64)
        x, w = torch.ones(rows, 64, requires_grad=True), torch.ones(64, 64, requires_grad=True)
        for save in ("gathered", "shard"):
            y = ub_overlap.all_gather_matmul(x, w, name, save=save)
            ub_overlap.matmul_reduce_scatter(y, w, name).sum().backward()
        again = [ub_overlap.initialize_group(name, (4096, 64), torch.float32), ub_overlap.initialize_group(name, 5)]
    return {"slot": slot, "again": again, "bad": bad, "lines": lines, "growths": bound(name).growths}


def later(rank: int, world: int) -> dict[str, Any]:
    """Initialize a group in use, then with sizes that differ by rank, then with a larger request on one rank."""
    name = new_group(world)
    bad = gather(name, rank, world, 4)
    first = bound(name).slot_bytes
    with logged() as lines:
        mixed = ub_overlap.initialize_group(name, (1 + rank) * MIB)
        bad += gather(name, rank, world, world * MIB // 16 // world)
    most = ub_overlap.initialize_group(dist.new_group(list(range(world))), MIB if rank else 3 * MIB)
    return {"first": first, "mixed": mixed, "most": most, "bad": bad, "lines": lines, "growths": bound(name).growths}


def without_arena(rank: int, world: int) -> dict[str, Any]:
    """Groups of one rank, or of ranks on several hosts, need no arena."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    found = {"alone": ub_overlap.initialize_group(alone, MIB)}
    with reset(), logged() as lines:
        C.testing.set_host_id(f"host{rank}:boot:1")
        name = new_group(world)
        found["hosts"] = ub_overlap.initialize_group(name, MIB)
        ub_overlap.initialize_group(name, 2 * MIB)
        bad = gather(name, rank, world, 4)
    return {**found, "lines": lines, "bad": bad}


def alone_in_it(rank: int, world: int) -> str:
    """The last rank does not call initialize."""
    name = new_group(world)
    with reset():
        settings.configure(init_timeout_s=1.0)
        if rank == world - 1:
            time.sleep(2.5)
            return ""
        try:
            ub_overlap.initialize_group(name, MIB)
        except errors.PeerTimeoutError as error:
            return str(error)
        return "nothing was raised"


def mapped() -> int:
    """Return the bytes of slots that this process maps, its own and its peers'."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/ub_overlap-" in line:
            low, high = (int(x, 16) for x in re.split("[- ]", line)[:2])
            total += high - low
    return total


def block(rank: int, world: int, seed: int, tokens: int, hidden: int) -> dict[str, Any]:
    """Run the sites of a sequence-parallel Llama block, forward and backward, in the given order.

    Activations are `tokens` x `hidden` bf16 and smaller. The inner widths are small: they do not affect the arena.
    """
    name, thin, order = new_group(world), 8, random.Random(seed)
    before = mapped()
    w_in = torch.randn(hidden, thin, dtype=torch.bfloat16).mul_(0.1).requires_grad_()
    w_out = torch.randn(thin, hidden, dtype=torch.bfloat16).requires_grad_()
    slots = []

    def gather_site(rows: int) -> None:
        x = torch.randn(rows // world, hidden, dtype=torch.bfloat16, requires_grad=True)
        save = order.choice(("gathered", "shard"))  # the same on all ranks: they share the seed
        ub_overlap.all_gather_matmul(x, w_in, name, save=save).sum().backward()

    def scatter_site(rows: int) -> None:
        x = torch.randn(rows, thin, dtype=torch.bfloat16, requires_grad=True)
        ub_overlap.matmul_reduce_scatter(x, w_out, name).sum().backward()

    runs = [(site, rows) for site in (gather_site, scatter_site) for rows in (tokens, tokens // 2, tokens * 3 // 4)]
    order.shuffle(runs)
    for site, rows in runs:
        site(rows)
        slots.append(bound(name).slot_bytes)
    own = (mapped() - before) // world
    session.close(name)
    grown = [(a, b) for a, b in zip([0, *slots], slots, strict=False) if a != b]
    return {"own": own, "slots": slots, "peak": 2 * max(a + b for a, b in grown)}


def watched(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 fails in a call that no other rank makes. The other ranks log the failure and then raise it."""
    name = new_group(world)
    bad = gather(name, rank, world, 4)
    with reset(), logged("ub_overlap.runtime", logging.ERROR) as lines:
        settings.configure(step_timeout_s=1.0)
        raised = ""
        if rank == 0:
            try:
                gather(name, rank, world, 4, site="/lonely")
            except errors.PeerTimeoutError as error:
                raised = f"{type(error).__name__}: {error}"
        deadline = time.monotonic() + 20
        while not lines and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(4 * watchdog._watchdog.period_s)  # it logs once
        try:
            if rank:
                ub_overlap.check_errors(name)
        except errors.UbOverlapError as error:
            raised = f"{type(error).__name__}: {error}"
        ours = [line for line in lines if f"'{name}'" in line]
        return {"lines": ours, "raised": raised, "bad": bad}


def unpoisoned(rank: int, world: int) -> list[str]:
    """check_errors() without failures passes, with every form of the group argument."""
    group = dist.new_group(list(range(world)))
    bad = gather(group.group_name, rank, world, 4)
    ub_overlap.check_errors(group)
    ub_overlap.check_errors(group.group_name)
    ub_overlap.check_errors()
    return bad + gather(group.group_name, rank, world, 4)


class FakeArena:
    """A fake SymmetricArena over host shared memory, with the interface that sessions use."""

    def __init__(self, host: Any, group: str, rank: int, ranks: int, slot_bytes: int, abort: Any) -> None:
        self.core, self.slot_bytes = host, slot_bytes

    data_address = "0"

    def bytes_of_slot(self, slot: int) -> int:
        return self.slot_bytes if slot < SLOTS else 0

    def rendezvous(self, tokens: list[str]) -> None:
        assert tokens == ["0"] * len(tokens)


def gpus(rank: int, world: int, nvlink: bool | None, any_link: bool = False) -> dict[str, Any]:
    """Bind a CUDA group on a fake machine: one GPU per rank, all peers, with these links."""
    name = new_group(world)
    with pytest.MonkeyPatch.context() as patch, reset(), logged() as lines:
        settings.configure(links="any" if any_link else "nvlink")
        patch.setattr(symm_mem, "refuse_capture", lambda doing: None)
        patch.setattr(symm_mem, "describe_gpu", lambda: {"uuid": f"u{rank}", "name": "Fake", "capability": [8, 0]})
        patch.setattr(symm_mem, "device_label", lambda: f"cuda:{rank} (Fake)")
        patch.setattr(symm_mem, "SymmetricArena", FakeArena)
        patch.setattr(bind, "_load_algorithms", lambda: "")
        row = {"peer": [True] * world, "nvlink": [nvlink if other != rank else True for other in range(world)]}
        patch.setattr(symm_mem, "find_links", lambda uuids, me: row if uuids == [f"u{r}" for r in range(world)] else {})
        found = bind.bind(name, "cuda", 1 << 20, "op", "/site")
        settings.configure(links="nvlink")
    core = found.core
    return {
        "transport": core.transport,
        "reason": core.reason,
        "slot": found.slot_bytes,
        "error": found.pending_error(),
        "lines": lines,
    }
