"""The plain functions on GPUs: values and gradients against fp64, arenas made ahead, the watchdog, and host waits."""

from __future__ import annotations

import logging
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ub_overlap
from tests.gpu.cases import BF16, F32, Maker
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime import autotune, errors, ops, settings
from ub_overlap.runtime.session import session
from ub_overlap.runtime.session.bind import find_session

SLACK = {F32: 2e-5, BF16: 2e-2}


class Collected(logging.Handler):
    """Collect all log records of ub_overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def same(name: str, got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> None:
    assert got is not None and want is not None, name
    scale = want.abs().max().item() or 1.0
    error = (got.double() - want).abs().max().item() / scale
    if got.shape != want.shape or not error <= SLACK[dtype]:
        raise AssertionError(f"{name}: {tuple(got.shape)}, error {error:.3g}; expected {tuple(want.shape)}, {SLACK[dtype]}")


def layer(lockstep: Lockstep, group: str, dtype: torch.dtype, save: str, strategy: str, dim: int) -> str:
    """Compute y = matmul_reduce_scatter(gelu(all_gather_matmul(x, W1)), W2), a Megatron MLP."""
    make, world = Maker(lockstep.device, lockstep.ranks), lockstep.ranks
    batch, rows, width, inner = 2, 96, 128, 192
    sizes = (rows, width) if dim == 0 else (batch, rows, width)
    x = make.randn(*sizes, dtype=dtype).requires_grad_()
    w1 = (make.randn(inner, width, dtype=dtype, scale=0.1)).t().requires_grad_()
    w2 = (make.randn(width, inner, dtype=dtype, scale=0.1)).t().requires_grad_()
    of_gather = "pipelined" if strategy == "direct" else strategy
    h = ub_overlap.all_gather_matmul(x, w1, group, gather_dim=dim, save=save, strategy=of_gather)
    y = ub_overlap.matmul_reduce_scatter(torch.nn.functional.gelu(h), w2, group, scatter_dim=dim, strategy=strategy)
    weight = make.randn(*y.shape, dtype=dtype)
    found = torch.autograd.grad((y * weight).sum(), (x, w1, w2))

    def whole(t: Tensor) -> Tensor:
        parts = [torch.empty_like(t.double()) for _ in range(world)]
        dist.all_gather(parts, t.detach().double().contiguous())
        return torch.cat(parts, dim)

    gx = whole(x).requires_grad_()
    a1, a2 = w1.detach().double().requires_grad_(), w2.detach().double().requires_grad_()
    partial = torch.nn.functional.gelu(gx @ a1) @ a2
    exact = partial.detach().clone()
    dist.all_reduce(exact)
    at = slice(lockstep.rank * rows, (lockstep.rank + 1) * rows)
    same("output", y, exact[at] if dim == 0 else exact[:, at], dtype)
    (partial * whole(weight)).sum().backward()
    total = gx.grad.clone()
    dist.all_reduce(total)
    same("input gradient", found[0], total[at] if dim == 0 else total[:, at], dtype)
    same("W1 gradient", found[1], a1.grad, dtype)
    same("W2 gradient", found[2], a2.grad, dtype)
    return "output and 3 gradients"


def initialized(lockstep: Lockstep, group: str) -> str:
    """After it no call of that size grows the arena, even if the first call is captured."""
    seen = Collected()
    logger = logging.getLogger("ub_overlap")
    logger.addHandler(seen)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        size = ub_overlap.initialize_group(group, (512 * lockstep.ranks, 256), BF16)
        again = ub_overlap.initialize_group(group, 4096)
        made = [text for text in seen.texts if "symmetric memory" in text or "shared memory" in text]
        if lockstep.cuda and not any("symmetric memory" in text for text in made):
            raise AssertionError(f"no transport in the log: {seen.texts}")
        if size < 512 * lockstep.ranks * 256 * 2 or again != size:
            raise AssertionError(f"{size} bytes, then {again}")
        before_calls = len(seen.texts)
        make = Maker(lockstep.device, lockstep.ranks)
        x, w = make.randn(512, 256, dtype=BF16), make.randn(256, 128, dtype=BF16, scale=0.1)
        if lockstep.cuda:
            graph = torch.cuda.CUDAGraph()
            ub_overlap.all_gather_matmul(x, w, group)  # load plans and modules; the arena exists
            lockstep.sync()
            with torch.cuda.graph(graph):
                y = ub_overlap.all_gather_matmul(x, w, group)
            graph.replay()
        else:
            y = ub_overlap.all_gather_matmul(x, w, group)
        lockstep.sync()
        session.check(group)
        grown = [text for text in seen.texts[before_calls:] if "grew" in text]
        if grown or not bool(y.isfinite().all()):
            raise AssertionError(f"grew: {grown}")
    finally:
        logger.removeHandler(seen)
        logger.setLevel(before)
    return f"slots of {size} bytes; {made[-1]}"


def watched(lockstep: Lockstep, group: str) -> str:
    """Rank 1 never arrives. The watchdogs of the others log it without further calls."""
    if lockstep.ranks < 2:
        pytest.skip("needs 2 ranks")
    seen = Collected()
    logging.getLogger("ub_overlap").addHandler(seen)
    timeout_s = settings.current().step_timeout_s
    try:
        make = Maker(lockstep.device, lockstep.ranks)
        x, w = make.randn(64, 64, dtype=BF16), make.randn(64, 64, dtype=BF16)
        ub_overlap.all_gather_matmul(x, w, group)
        lockstep.sync()
        settings.configure(step_timeout_s=2.0)
        out = None
        if lockstep.rank != 1:
            try:
                out = ub_overlap.all_gather_matmul(x, w, group)
            except errors.PeerTimeoutError:
                if lockstep.cuda:
                    raise
        time.sleep(3.5)
        told = [text for text in seen.texts if "PeerTimeoutError" in text]
        if lockstep.rank != 1 and not told:
            raise AssertionError(f"the watchdog said nothing; the log: {seen.texts}")
        if lockstep.cuda and out is not None and not bool(out.isnan().all()):
            raise AssertionError("the output is not NaN")
    finally:
        settings.configure(step_timeout_s=timeout_s)
        logging.getLogger("ub_overlap").removeHandler(seen)
    return "logged once" if len(told) <= 1 else f"logged {len(told)} times"


def group_lock_never_released(lockstep: Lockstep, group: str) -> str:
    """On rank 1 a call seems never to end. The next call there fails after one deadline as a wait for the group lock;
    its peers name rank 1."""
    if not lockstep.cuda or lockstep.ranks < 2:
        pytest.skip("needs 2 GPUs")
    before, deadline = settings.current().step_timeout_s, 2.0 if lockstep.rank == 1 else 3.0  # rank 1 sees it first
    make = Maker(lockstep.device, lockstep.ranks)
    x, w = make.randn(64, 64, dtype=BF16), make.randn(64, 64, dtype=BF16)
    ub_overlap.all_gather_matmul(x, w, group)
    lockstep.sync()
    lockstep.barrier()
    settings.configure(step_timeout_s=deadline)
    error: errors.UbOverlapError | None = None
    try:
        if lockstep.rank == 1:
            bound = find_session(group, "cuda")
            assert bound is not None
            ops.extension().testing.hold_group_lock(bound._arena.core)
        clock = time.monotonic()
        out = ub_overlap.all_gather_matmul(x, w, group)
        lockstep.sync()
        seconds = time.monotonic() - clock
        try:
            session.check(group)
        except errors.UbOverlapError as caught:
            error = caught
    finally:
        settings.configure(step_timeout_s=before)
        lockstep.barrier()
    if error is None or 1 not in getattr(error, "ranks", ()):
        raise AssertionError(f"expected an error that names rank 1, got {type(error).__name__}: {error}")
    if lockstep.rank == 1 and not isinstance(error, errors.DeviceTimeoutError):
        raise AssertionError(f"expected DeviceTimeoutError, got {type(error).__name__}: {error}")
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if isinstance(error, errors.DeviceTimeoutError) and (f"{name}=1" in error.fix) != (os.environ.get(name) == "1"):
        raise AssertionError(f"the environment's part in it is not told: {error}")
    if seconds > 2 * deadline + 1 or (lockstep.rank == 1 and seconds < 0.9 * deadline):
        raise AssertionError(f"after {seconds:.1f} s, deadline {deadline:g} s")
    if not bool(out.isnan().all()):
        raise AssertionError("the output is not NaN")
    return f"after {seconds:.1f} s; rank 0: {type(error).__name__}"


def busy_stream(lockstep: Lockstep, group: str) -> str:
    """Growth and timing of a group do not wait for another stream that is busy for seconds."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no streams")
    make, asleep = Maker(lockstep.device, lockstep.ranks), 8.0
    small, big = make.randn(64, 64, dtype=BF16), make.randn(8192, 512, dtype=BF16)
    w, v = make.randn(64, 64, dtype=BF16), make.randn(512, 64, dtype=BF16, scale=0.1)
    strategies = ("pipelined", f"pipelined:chunks={2 * lockstep.ranks}")
    open_ones = "|".join(strategies)

    def timed_call(name: str, site: str) -> torch.Tensor:
        return torch.ops.ub_overlap.all_gather_matmul(
            small, [w], [False], [False], 1, False, False, [], [], open_ones, name, site
        )[1][0]

    # On another group: loading a kernel may wait for the whole device. A search for algorithms loads those of all proposals.
    timed_call(lockstep.group(), "/loaded")
    for strategy in strategies:
        for _ in range(4):
            ub_overlap.all_gather_matmul(small, w, lockstep.group(), strategy=strategy)
            ub_overlap.all_gather_matmul(big, v, lockstep.group(), strategy=strategy)
    ub_overlap.all_gather_matmul(small, w, group)
    bound = find_session(group, "cuda")
    assert bound is not None
    grown, lane = bound.growths, torch.cuda.Stream()
    lockstep.sync()
    lockstep.barrier()
    with torch.cuda.stream(lane):
        lockstep.sleep_on_device(asleep)
    clock = time.monotonic()
    y = ub_overlap.all_gather_matmul(big, v, group)
    torch.cuda.current_stream().synchronize()
    growth = time.monotonic() - clock
    timed = timed_call(group, "/busy")
    torch.cuda.current_stream().synchronize()
    both, still = time.monotonic() - clock, not lane.query()
    lockstep.sync()
    session.check(group)
    if bound.growths == grown or not autotune.tuned_strategies("/busy"):
        raise AssertionError(f"nothing to see: {bound.growths - grown} growths, timed {autotune.tuned_strategies('/busy')}")
    if not still:
        raise AssertionError(f"the other stream was done first: growth took {growth:.1f} s, with the timing {both:.1f} s")
    if not bool(y.isfinite().all()) or not bool(timed.isfinite().all()):
        raise AssertionError("the outputs are not finite")
    return f"growth {growth:.2f} s, timing {both - growth:.2f} s, with another stream busy for {asleep:g} s"


def rebound(lockstep: Lockstep, group: str) -> str:
    """Ranks 0 and 1 share memory in their own group first, so that torch's rendezvous counts differ. Then all ranks bind,
    close and bind again."""
    if not lockstep.cuda or lockstep.ranks < 3:
        pytest.skip("needs 3 GPUs")
    make = Maker(lockstep.device, lockstep.ranks)
    x, w = make.randn(32, 64, dtype=F32), make.randn(64, 48, dtype=F32, scale=0.1)
    # With the backend of the world: torch 2.11 hangs in new_group of another backend, since ranks outside of the group join
    # a split of the NCCL communicator that its members never call.
    pair = lockstep.new_group([0, 1])
    if pair:
        ub_overlap.all_gather_matmul(x, w, pair)
        lockstep.sync()
    parts = [torch.empty_like(x) for _ in range(lockstep.ranks)]
    dist.all_gather(parts, x)
    for life in range(3):
        y = ub_overlap.all_gather_matmul(x, w, group)
        same(f"life {life}", y, torch.cat(parts).double() @ w.double(), F32)
        lockstep.sync()
        session.check(group)
        lockstep.barrier()
        session.close(group, "cuda")
        lockstep.barrier()
    return "3 lives of one group"


RANKS = int(os.environ.get("WORLD_SIZE", "2"))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("strategy", ["pipelined", f"pipelined:chunks={2 * RANKS}", "direct", "none"])
@pytest.mark.parametrize("save", ["gathered", "shard"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_layer(lockstep: Lockstep, group: str, dtype: torch.dtype, save: str, strategy: str, dim: int) -> None:
    lockstep.note(layer(lockstep, group, dtype, save, strategy, dim))


def test_arena_made_ahead(lockstep: Lockstep, own_group: str) -> None:
    lockstep.note(initialized(lockstep, own_group))


def test_watchdog(lockstep: Lockstep, own_group: str) -> None:
    lockstep.note(watched(lockstep, own_group))


def test_growth_and_timing_with_a_busy_stream(lockstep: Lockstep, own_group: str) -> None:
    lockstep.note(busy_stream(lockstep, own_group))


def test_rebinding_with_unequal_rendezvous_counts(lockstep: Lockstep, own_group: str) -> None:
    lockstep.note(rebound(lockstep, own_group))


def test_a_group_lock_that_is_never_released(lockstep: Lockstep, own_group: str) -> None:
    lockstep.note(group_lock_never_released(lockstep, own_group))
