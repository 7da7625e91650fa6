"""Cached float8 weights: kernels equal ATen bitwise, changes are detected, captures, streams, compiled models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu import captures
from tests.gpu.cases import BF16, F16, F32
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime.fp8.weight_cache import cast_in_aten

SHAPES = ((16, 16), (48, 32), (16, 65536), (65536, 16), (272, 4112), (3584, 8192), (8192, 1280))
AXES = (None, -1, -2)
UNTOUCHED = 77


def op(w: Tensor, axis: int | None, round_to: torch.dtype = BF16, reuse_forward: bool = False) -> tuple[Tensor, Tensor]:
    return torch.ops.ub_overlap.fp8_cached_weight.default(w, round_to, axis, None, reuse_forward, [])


def same(a: Tensor, b: Tensor) -> bool:
    """Compare bitwise; all NaNs are equal."""
    return a.shape == b.shape and torch.equal(a.float().nan_to_num(nan=12345.0), b.float().nan_to_num(nan=12345.0))


def transposed(w: Tensor, axis: int | None, q: Tensor, round_to: torch.dtype = BF16) -> Tensor:
    return torch.ops.ub_overlap.fp8_cached_weight_transposed.default(w, round_to, axis, q)


def right(
    w: Tensor, axis: int | None, round_to: torch.dtype, where: str, reuse_forward: bool = False, with_copy: bool = False
) -> None:
    q, scale = op(w, axis, round_to, reuse_forward)
    wanted, unit = cast_in_aten(w.to(round_to), axis)
    assert same(scale, unit), f"{where}: {int((scale != unit).sum())} scales differ"
    assert same(q, wanted), f"{where}: {int((q.float() != wanted.float()).sum())} elements differ"
    if with_copy:
        copy = transposed(w, axis, q, round_to)
        assert copy.is_contiguous() and same(copy, wanted.t()), f"{where}: the transposed copy differs"


def all_right(w: Tensor, found: list[tuple[Tensor, Tensor]], where: str) -> None:
    """Assert that these (bytes, scale) are the cast of `w`."""
    wanted, unit = cast_in_aten(w, None)
    for q, scale in found:
        assert torch.equal(q, wanted.view(torch.uint8)) and torch.equal(scale, unit), where


def noise(lockstep: Lockstep, *shape: int) -> Tensor:
    """Return random numbers over many binades."""
    return torch.randn(shape, device=lockstep.device) * torch.exp2(torch.randint(-12, 6, shape, device=lockstep.device).float())


def cast(lockstep: Lockstep, dtype: torch.dtype, round_to: torch.dtype) -> str:
    """Cast every shape and axis, aligned or not, with zero lines and non-finite values."""
    for rows, cols in SHAPES:
        for shift in (0, 1):
            flat = torch.empty(rows * cols + shift, device=lockstep.device, dtype=dtype)
            w = flat[shift:].view(rows, cols)
            w.copy_(noise(lockstep, rows, cols))
            w[3], w[:, 5] = 0, 0
            for axis in AXES:
                where = f"[{rows}, {cols}] shifted by {shift}, axis {axis}"
                right(w, axis, round_to, where, with_copy=axis != -2)
                w[7, 9] = 3000.0
                right(w, axis, round_to, f"{where}, changed", with_copy=True)
                w[7, 9] = 2000.0
                right(w, axis, round_to, f"{where}, changed again", with_copy=True)
            for bad in (torch.inf, -torch.inf, torch.nan):
                w[rows // 2, cols // 2] = bad
                for axis in AXES:
                    right(w, axis, round_to, f"[{rows}, {cols}], {bad}, axis {axis}")
            if not lockstep.cuda and rows * cols > 4096:
                break
    return f"{len(SHAPES)} shapes, bitwise"


def changes(lockstep: Lockstep, turns: int) -> str:
    """Detect one flipped bit, two swapped rows, all signs flipped. Write nothing if nothing changed."""
    rows, cols = 256, 512
    gen = torch.Generator().manual_seed(5)
    for axis in AXES:
        w = noise(lockstep, rows, cols).to(BF16)
        bits = w.view(torch.int16)
        for turn in range(turns):
            right(w, axis, BF16, f"axis {axis}, turn {turn}")
            q, _ = op(w, axis)
            before = q.view(torch.uint8).clone()
            q.view(torch.uint8).fill_(UNTOUCHED)
            op(w, axis)
            assert (q.view(torch.uint8) == UNTOUCHED).all(), f"axis {axis}, turn {turn}: cast though nothing changed"
            q.view(torch.uint8).copy_(before)
            kind, at = turn % 4, [int(torch.randint(n, (1,), generator=gen)) for n in (rows, cols, 15)]
            if kind == 0:
                bits[at[0], at[1]] ^= 1 << at[2]
            elif kind == 1:
                other = (at[0] + 1 + at[1]) % rows
                w[[at[0], other]] = w[[other, at[0]]]
            elif kind == 2:
                w.neg_()
            else:  # ones with columns swapped in some rows: many equal differences
                w.copy_(torch.randint(0, 2, (rows, cols), device=w.device) * 2 - 1)
                op(w, axis)
                some = torch.randint(rows, (2,), generator=gen).tolist()
                w[some, 0:2], w[some, 4:6] = w[some, 4:6], w[some, 0:2]
        right(w, axis, BF16, f"axis {axis}, the end")
    return f"{3 * turns} changes"


def captured(lockstep: Lockstep, turns: int) -> str:
    """Replays and eager calls see what another graph's replay has written."""
    if not lockstep.cuda:
        pytest.skip("there is nothing to capture on the CPU")
    for axis in AXES:
        w = noise(lockstep, 512, 1024).to(BF16)
        right(w, axis, BF16, "first")
        lockstep.sync()
        forward, optimizer, new = (torch.cuda.CUDAGraph() for _ in range(3))
        with torch.cuda.graph(forward):
            found = op(w, axis)
            again = op(w, axis, reuse_forward=True)
        copied = torch.cuda.CUDAGraph()
        if axis is not None:
            transposed(w, axis, op(w, axis)[0])  # allocates the copy: after the capture of `forward`, which does not write it
            lockstep.sync()
        with torch.cuda.graph(copied):
            copy = transposed(w, axis, op(w, axis)[0])
        with torch.cuda.graph(optimizer):
            w.mul_(0.9375).add_(0.001)
        for turn in range(turns):
            optimizer.replay()
            if turn % 4 == 3:
                copied.replay()
                assert same(copy, cast_in_aten(w, axis)[0].t()), f"axis {axis}, copy of turn {turn}"
            if turn % 3 == 2:
                right(w, axis, BF16, f"axis {axis}, plain call of turn {turn}", with_copy=axis is not None)
            for _ in range(1 + turn % 2):
                forward.replay()
            for mine, wanted in ((found, cast_in_aten(w, axis)), (again, found)):
                assert all(same(a, b) for a, b in zip(mine, wanted, strict=True)), f"axis {axis}, turn {turn}"
            if axis is not None:  # `forward` has cast `w` without the copy
                right(w, axis, BF16, f"axis {axis}, copy after the replay of turn {turn}", with_copy=True)
        other = noise(lockstep, 512, 1024).to(BF16)  # its first call is captured
        with torch.cuda.graph(new):
            found = op(other, axis)
        for turn in range(3):
            other.mul_(1.5)
            new.replay()
            assert all(same(a, b) for a, b in zip(found, cast_in_aten(other, axis), strict=True)), f"new, turn {turn}"
            right(other, axis, BF16, f"new, plain call of turn {turn}")
    return f"{turns} replays by axis, bitwise"


def streams(lockstep: Lockstep, turns: int) -> str:
    """Call on two streams; only the weight's writer waits for them."""
    if not lockstep.cuda:
        pytest.skip("streams are for GPUs")
    w = noise(lockstep, 4096, 4096).to(BF16)
    both = [torch.cuda.Stream(lockstep.device) for _ in range(2)]
    home = torch.cuda.current_stream(lockstep.device)
    for turn in range(turns):
        for stream in both:
            home.wait_stream(stream)
        w.mul_(1.0 if turn % 4 == 3 else 0.875 if turn % 2 else 1.25)
        found = []
        for stream in both if turn % 3 else reversed(both):
            stream.wait_stream(home)
            with torch.cuda.stream(stream):
                q, scale = op(w, None)
                found.append((q.view(torch.uint8).clone(), scale.clone()))
                found.append((transposed(w, None, q).view(torch.uint8).t().clone(), scale.clone()))
        lockstep.sync()
        all_right(w, found, f"turn {turn}")
    return f"{turns} turns"


def threads(lockstep: Lockstep, turns: int) -> str:
    """Two threads cast a changed weight, on one stream and on two."""
    if not lockstep.cuda:
        pytest.skip("tests/compiler has it for the CPU")
    w = noise(lockstep, 2048, 2048).to(BF16)
    both = [torch.cuda.Stream(lockstep.device) for _ in range(2)]

    def call(stream: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
        torch.cuda.set_device(lockstep.device)
        with torch.cuda.stream(stream):
            q, scale = op(w, None)
            return q.view(torch.uint8).clone(), scale.clone()

    with ThreadPoolExecutor(2) as pool:
        for turn in range(turns):
            w.mul_(0.5 if turn % 2 else 3.0)
            lockstep.sync()
            found = list(pool.map(call, both if turn % 3 else both[:1] * 2))
            lockstep.sync()
            all_right(w, found, f"turn {turn}")
    return f"{turns} turns"


def swapped(lockstep: Lockstep) -> str:
    """Backward after the weight's elements were swapped for a while; captured forward, eager backward."""
    if not lockstep.cuda:
        pytest.skip("tests/compiler has it for the CPU")
    w = noise(lockstep, 512, 512).to(BF16)
    own = w.clone()
    op(w, None)
    w.mul_(-3)
    op(w, None)
    w.copy_(own)
    right(w, None, BF16, "swapped", reuse_forward=True)
    lockstep.sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(w, None)
    for turn in range(4):
        w.mul_(1.25)
        graph.replay()
        w.mul_(0.5)
        right(w, None, BF16, f"captured forward, turn {turn}", reuse_forward=True)
    for turn in range(4):  # `graph` does not write the copy, and a forward without a backward was counted before it
        right(w, None, BF16, f"copy, turn {turn}", with_copy=True)
        w.mul_(-1.5)
        graph.replay()
        right(w, None, BF16, f"copy after a captured forward, turn {turn}", reuse_forward=True, with_copy=True)
    return "as they are"


def compiled(lockstep: Lockstep, recipe: str, turns: int) -> str:
    """Steps of two microbatches, with and without torch's graphs, equal casts in every call."""
    results: list[list[Tensor]] = []
    counted = 0
    for graphs in (False, True) if lockstep.cuda else (False,):
        for kind in ("per_call", "cached"):
            torch.manual_seed(3)
            if lockstep.cuda:
                captures.reset()
            size = 512
            model = nn.Sequential(nn.Linear(size, 1024), nn.SiLU(), nn.Linear(1024, size), nn.Linear(size, size))
            model = model.to(lockstep.device, BF16)
            options: dict[str, Any] = {"fp8": {"recipe": recipe, "weights": kind}, "overlap": "force"}
            options["fp8"]["state"] = f"weights {kind} {graphs}"
            run: Any = torch.compile(model, backend="ub_overlap", options={**options, "triton.cudagraphs": graphs})
            found: list[Tensor] = []
            for turn in range(turns):
                if lockstep.cuda:
                    torch.compiler.cudagraph_mark_step_begin()
                x = (torch.randn(size, size, device=lockstep.device) * (1 + turn % 3)).to(BF16)
                found += captures.step(run, model, x)
                for w in model.parameters():
                    if kind == "cached" and w.dim() == 2:
                        right(
                            w.detach(),
                            None if recipe != "rowwise" else -1,
                            BF16,
                            f"turn {turn}, graphs {graphs}",
                            reuse_forward=True,
                        )
                    if turn % 2:
                        w.data.mul_(0.98)
            if graphs:
                counted = captures.count(lockstep.device)
            results.append(found)
    worst = 0.0
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            worst = max(worst, float((a.float() - b.float()).norm() / b.float().norm()))
    assert worst < 0.02, f"differs by {worst:.2e}"
    return f"{turns} calls, {counted} graphs, {worst:.1e} apart at most"


def speed(lockstep: Lockstep, axis: int | None) -> str:
    """Time 8192 x 8192, unchanged and changed, against ATen's cast."""
    if not lockstep.cuda:
        pytest.skip("a reference on the CPU")
    w = torch.randn(8192, 8192, device=lockstep.device, dtype=BF16)
    one = w.view(-1)[:1]
    plain = torch.compile(cast_in_aten)

    def timed(call: Any) -> float:
        for _ in range(5):
            call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(50):
            call()
        end.record()
        lockstep.sync()
        return begin.elapsed_time(end) * 1000 / 50

    def changed() -> None:
        one.neg_()
        op(w, axis)

    def theirs() -> None:
        one.neg_()
        plain(w, axis)

    unchanged_us, changed_us, compiled_us = timed(lambda: op(w, axis)), timed(changed), timed(theirs)
    transposed(w, axis, op(w, axis)[0])
    copied_us = timed(changed)
    gbs = 2 * w.numel() / unchanged_us / 1e3
    times = f"changed {changed_us:.0f} us, with a transposed copy {copied_us:.0f}, Inductor's {compiled_us:.0f}"
    return f"{unchanged_us:.0f} us, {gbs:.0f} GB/s; {times}"


def layout_copies(lockstep: Lockstep) -> str:
    """Copy transposed views of all kinds of sizes and addresses, and other views."""
    copy = torch.ops.ub_overlap.fp8_layout_copy.default
    shapes = (*SHAPES, (16, 48), (80, 4112), (65, 33), (1, 16), (0, 16))
    for rows, cols in shapes:
        for shift in (0, 1, 16):
            flat = torch.randint(256, (rows * cols + shift,), device=lockstep.device, dtype=torch.uint8)
            base = flat[shift:].view(rows, cols)
            for view in (base.t(), base, base[: rows // 2].t(), base[:, : cols // 2].t()):
                found = copy(view.view(torch.float8_e5m2)).view(torch.uint8)
                assert found.is_contiguous() and torch.equal(found, view), (rows, cols, shift, view.stride())
    return f"{len(shapes)} shapes, bitwise"


@pytest.mark.parametrize(("dtype", "round_to"), [(BF16, BF16), (F16, F16), (F32, BF16), (F32, F16)], ids=str)
def test_cast(lockstep: Lockstep, dtype: torch.dtype, round_to: torch.dtype) -> None:
    lockstep.note(cast(lockstep, dtype, round_to))


def test_changed_weights(lockstep: Lockstep) -> None:
    lockstep.note(changes(lockstep, 30 if lockstep.quick else 300))


def test_captured(lockstep: Lockstep) -> None:
    lockstep.note(captured(lockstep, 6 if lockstep.quick else 40))


def test_streams(lockstep: Lockstep) -> None:
    lockstep.note(streams(lockstep, 20 if lockstep.quick else 200))


def test_threads(lockstep: Lockstep) -> None:
    lockstep.note(threads(lockstep, 30 if lockstep.quick else 300))


def test_swapped_elements(lockstep: Lockstep) -> None:
    lockstep.note(swapped(lockstep))


def test_layout_copies(lockstep: Lockstep) -> None:
    lockstep.note(layout_copies(lockstep))


@pytest.mark.deadline(150)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_compiled(lockstep: Lockstep, recipe: str) -> None:
    lockstep.note(compiled(lockstep, recipe, 6 if lockstep.quick else 16))


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_speed(lockstep: Lockstep, axis: int | None) -> None:
    lockstep.note(speed(lockstep, axis))
