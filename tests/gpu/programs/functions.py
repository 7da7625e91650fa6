"""The plain functions on GPUs: values and gradients against fp64, `initialize` before the first step and before a capture, and
the watchdog while nobody calls anything.

    torchrun --nproc-per-node 4 tests/gpu/programs/functions.py [--quick] [--only TEXT]
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

from tests.gpu.frame import Frame, Skip  # isort: skip

import torch
import torch.distributed as dist
from torch import Tensor

import ub_overlap
from tests.gpu.cases import BF16, F32, Maker
from ub_overlap.runtime import errors, ops, session, settings

SLACK = {F32: 2e-5, BF16: 2e-2}


class Collected(logging.Handler):
    """Everything that ub_overlap logs."""

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


def layer(frame: Frame, group: str, dtype: torch.dtype, save: str, strategy: str, dim: int) -> str:
    """y = matmul_reduce_scatter(gelu(all_gather_matmul(x, W1)), W2): what a Megatron layer is."""
    make, world = Maker(frame.device, frame.world), frame.world
    batch, rows, width, inner = 2, 96, 128, 192
    sizes = (rows, width) if dim == 0 else (batch, rows, width)
    x = make.randn(*sizes, dtype=dtype).requires_grad_()
    w1 = (make.randn(inner, width, dtype=dtype, scale=0.1)).t().requires_grad_()
    w2 = (make.randn(width, inner, dtype=dtype, scale=0.1)).t().requires_grad_()
    h = ub_overlap.all_gather_matmul(x, w1, group, gather_dim=dim, save=save, strategy=strategy)
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
    at = slice(frame.rank * rows, (frame.rank + 1) * rows)
    same("output", y, exact[at] if dim == 0 else exact[:, at], dtype)
    (partial * whole(weight)).sum().backward()
    total = gx.grad.clone()
    dist.all_reduce(total)
    same("input gradient", found[0], total[at] if dim == 0 else total[:, at], dtype)
    same("W1 gradient", found[1], a1.grad, dtype)
    same("W2 gradient", found[2], a2.grad, dtype)
    return "output and 3 gradients"


def initialized(frame: Frame, group: str) -> str:
    """After it no call of that size grows anything, not in a capture as the very first call either."""
    seen = Collected()
    logger = logging.getLogger("ub_overlap")
    logger.addHandler(seen)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        size = ub_overlap.initialize(group, (512 * frame.world, 256), BF16)
        again = ub_overlap.initialize(group, 4096)
        made = [text for text in seen.texts if "symmetric memory" in text or "shared memory" in text]
        if frame.cuda and not any("symmetric memory" in text for text in made):
            raise AssertionError(f"no transport in the log: {seen.texts}")
        if size < 512 * frame.world * 256 * 2 or again != size:
            raise AssertionError(f"{size} bytes, then {again}")
        before_calls = len(seen.texts)
        make = Maker(frame.device, frame.world)
        x, w = make.randn(512, 256, dtype=BF16), make.randn(256, 128, dtype=BF16, scale=0.1)
        if frame.cuda:
            graph = torch.cuda.CUDAGraph()
            ub_overlap.all_gather_matmul(x, w, group)  # plans and modules; the arena is there
            frame.sync()
            with torch.cuda.graph(graph):
                y = ub_overlap.all_gather_matmul(x, w, group)
            graph.replay()
        else:
            y = ub_overlap.all_gather_matmul(x, w, group)
        frame.sync()
        session.check(group)
        grown = [text for text in seen.texts[before_calls:] if "grew" in text]
        if grown or not bool(y.isfinite().all()):
            raise AssertionError(f"grew: {grown}")
    finally:
        logger.removeHandler(seen)
        logger.setLevel(before)
    return f"slots of {size} bytes; {made[-1]}"


def watched(frame: Frame, group: str) -> str:
    """Rank 1 does not come. The others call nothing more: their watchdogs say so."""
    if frame.world < 2:
        raise Skip("needs 2 ranks")
    seen = Collected()
    logging.getLogger("ub_overlap").addHandler(seen)
    timeout_s = settings.current().step_timeout_s
    try:
        make = Maker(frame.device, frame.world)
        x, w = make.randn(64, 64, dtype=BF16), make.randn(64, 64, dtype=BF16)
        ub_overlap.all_gather_matmul(x, w, group)
        frame.sync()
        settings.configure(step_timeout_s=2.0)
        out = None
        if frame.rank != 1:
            try:
                out = ub_overlap.all_gather_matmul(x, w, group)
            except errors.PeerTimeoutError:
                if frame.cuda:
                    raise
        time.sleep(3.5)
        told = [text for text in seen.texts if "PeerTimeoutError" in text]
        if frame.rank != 1 and not told:
            raise AssertionError(f"the watchdog said nothing; the log: {seen.texts}")
        if frame.cuda and out is not None and not bool(out.isnan().all()):
            raise AssertionError("the output is not poisoned")
    finally:
        settings.configure(step_timeout_s=timeout_s)
        logging.getLogger("ub_overlap").removeHandler(seen)
    return "logged once" if len(told) <= 1 else f"logged {len(told)} times"


def main() -> int:
    with Frame("plain functions") as frame:
        for dtype in (BF16, F32):
            for save in ("gathered", "shard"):
                for strategy in ("pipelined", f"pipelined:chunks={2 * frame.world}", "none"):
                    for dim in (0, 1):
                        label = f"layer {str(dtype).removeprefix('torch.')} {save} {strategy} dim {dim}"
                        frame.row(label, lambda g, d=dtype, s=save, how=strategy, at=dim: layer(frame, g, d, s, how, at))
        frame.row("initialize", lambda g: initialized(frame, g), own=True)
        frame.row("watchdog", lambda g: watched(frame, g), own=True)
    return frame.code


if __name__ == "__main__":
    ops.load()
    sys.exit(main())
