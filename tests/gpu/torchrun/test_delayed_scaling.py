"""Delayed scaling: the kernel equals ATen bitwise; captured calls; compiled models with and without graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fp8.rank_fp8 import run_microbatches, run_unequal_ranks
from tests.gpu import captures
from tests.gpu.cases import BF16, E4M3, E5M2, F16, F32
from tests.gpu.lockstep import Lockstep
from tests.models.case import on
from ub_overlap import fp8_state
from ub_overlap.runtime import errors
from ub_overlap.runtime.fp8.amax_history import cast_in_aten, join_keys
from ub_overlap.runtime.ops.fp8_amax_history import fp8_amax_history
from ub_overlap.runtime.ops.fp8_quantize import fp8_quantize

SIZES = (0, 1, 15, 16, 4096 + 5, 300 * 4096, (1 << 22) + 3)


def same(a: Tensor, b: Tensor) -> bool:
    """Compare bitwise; all NaNs are equal."""
    return torch.equal(a.float().nan_to_num(nan=12345.0), b.float().nan_to_num(nan=12345.0))


def cast(lockstep: Lockstep, dtype: torch.dtype, format: torch.dtype) -> str:
    """Cast every size, aligned or not, with empty and too small histories and non-finite values."""
    weight = torch.ones(1, device=lockstep.device)
    for size in SIZES:
        for shift in (0, 1):
            x = (torch.randn(size + shift, device=lockstep.device) * 3).to(dtype)[shift:]
            if size > 20:
                x[3], x[7], x[11] = torch.inf, -torch.inf, torch.nan
            for past_amax in (0.0, 0.5):
                amax = torch.tensor([9.0, past_amax], device=lockstep.device)
                ours, theirs = (torch.full((1,), 0.25, device=lockstep.device) for _ in range(2))
                key = join_keys("cast", [str(dtype)])
                _, slots = fp8_amax_history(weight, key, False)
                history, slot = fp8_state("cast").history_of(str(dtype), x.device), int(slots)
                history.current[slot] = 0.25
                q, scale = fp8_quantize(x, amax, slots.expand(2), 1, key, format, "forward", "")
                ours.copy_(history.current[slot : slot + 1])
                wanted, unit = cast_in_aten(x, amax, 1, theirs, format)
                where = f"{size} elements shifted by {shift}, history {past_amax}"
                assert torch.equal(scale, unit), f"{where}: scale {scale.item()}, wanted {unit.item()}"
                assert torch.equal(ours, theirs), f"{where}: recorded {ours.item()}, wanted {theirs.item()}"
                assert q.dtype == format and same(q, wanted), f"{where}: {(q.float() != wanted.float()).sum()} differ"
    return f"{len(SIZES)} sizes, bitwise"


def captured(lockstep: Lockstep, turns: int) -> str:
    """Replays of a captured call with changing inputs leave the histories of eager calls."""
    if not lockstep.cuda:
        pytest.skip("there is nothing to capture on the CPU")
    inputs = [torch.randn(256, 512, device=lockstep.device, dtype=BF16) * (1 + turn % 5) for turn in range(turns)]
    static, weight = inputs[0].clone(), torch.ones(1, device=lockstep.device)

    def call(name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = join_keys(name, ["x", "y"])
        amax, slots = fp8_amax_history(weight, keys, True)
        q, scale = fp8_quantize(x, amax, slots, 0, join_keys(name, ["x"]), E4M3, "forward", "")
        fp8_quantize(-2 * x, amax, slots, 1, join_keys(name, ["y"]), E5M2, "backward", "")
        return amax, q, scale

    call("captured", static)
    fp8_state("captured").reset()
    lockstep.sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call("captured", static)
    for x in inputs:
        static.copy_(x)
        graph.replay()
        for mine, wanted in zip(found, call("plain", x), strict=True):
            assert same(mine, wanted)
    ours, theirs = fp8_state("captured").state_dict(), fp8_state("plain").state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    return f"{turns} replays, bitwise"


def compiled(lockstep: Lockstep, turns: int) -> str:
    """Outputs, gradients and histories are bitwise equal with and without torch's graphs."""
    if not lockstep.cuda:
        pytest.skip("graphs are for GPUs")
    results: list[list[Tensor]] = []
    for graphs in (False, True):
        torch.manual_seed(3)
        captures.reset()
        model = nn.Sequential(nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 512)).to(lockstep.device, BF16)
        options = {"fp8": {"recipe": "delayed", "state": f"graphs {graphs}"}, "overlap": "force"}
        run: Any = torch.compile(model, backend="ub_overlap", options={**options, "triton.cudagraphs": graphs})
        found: list[Tensor] = []
        for turn in range(turns):
            torch.compiler.cudagraph_mark_step_begin()
            x = (torch.randn(256, 512, device=lockstep.device) * (1 + turn % 3)).to(BF16)
            found += captures.step(run, model, x)
        if graphs:
            captures.count(lockstep.device)
        state = fp8_state(f"graphs {graphs}").state_dict()
        assert len(state) == 4, sorted(state)
        results.append([*found, *(state[key] for key in sorted(state))])
    wrong = [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"tensors {wrong[:5]} of {len(results[0])} differ"
    return f"{turns} steps, bitwise"


def first_seen_in_a_capture(lockstep: Lockstep) -> str:
    """A weight first seen in a capture: a copy of the only module's is accepted, another module's is refused."""
    if not lockstep.cuda:
        pytest.skip("there is nothing to capture on the CPU")
    one, other = (torch.ones(1, device=lockstep.device) for _ in range(2))
    keys = join_keys("capture copy", ["x"])
    _, column = fp8_amax_history(one, keys, False)
    lockstep.sync()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert fp8_amax_history(one.clone(), keys, False)[1].shape == column.shape
    refused = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            one.clone()
            fp8_amax_history(other, keys, False)
    except errors.Fp8StateError as error:
        refused = str(error)
    assert "call every module once before the capture" in refused, refused or "no error"
    lockstep.sync()
    x, w = (torch.randn(n, 512, device=lockstep.device).to(BF16) for n in (256, 1024))
    results: list[Tensor] = []
    for graphs in (False, True):
        captures.reset()
        options = {"fp8": {"recipe": "delayed", "state": f"argument {graphs}"}, "overlap": "force"}
        run: Any = torch.compile(lambda x, w: x @ w.t(), backend="ub_overlap", options={**options, "triton.cudagraphs": graphs})
        with torch.no_grad():
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                y = run(x, w).clone()
        results.append(y)
        if graphs:
            captures.count(lockstep.device)
    assert torch.equal(*results)
    return "a copy of the only one, another one, a weight that is an argument"


def ranks(lockstep: Lockstep) -> str:
    """Two steps of two microbatches with shards 8x apart: all ranks use one scale."""
    with on(lockstep.device):
        equal, kinds, _, casts, state = run_microbatches(lockstep.rank, lockstep.ranks)
    assert equal and casts == {"delayed"}, (equal, casts)
    assert kinds == {phase: ["all_gather_matmul", "matmul_reduce_scatter"] for phase in ("forward", "backward")}, kinds
    gathered = sorted(key for key in state if key.endswith(("up/x", "down/dy")))
    assert len(gathered) == 2, sorted(state)
    assert all((state[key][1:] > 0).sum() == 3 for key in gathered)  # of four calls; the last amax is not pushed yet
    with on(lockstep.device):
        found = run_unequal_ranks(lockstep.rank, lockstep.ranks)
    worst = max(max(errors) for errors in found.values())
    assert worst < 0.15, found
    return f"one scale of what is gathered: errors of {worst:.1e} at most where shards are 8x apart"


def speed(lockstep: Lockstep) -> str:
    """Time a cast of 8192 x 8192: two bytes read and one written per element."""
    if not lockstep.cuda:
        pytest.skip("a reference on the CPU")
    x = torch.randn(8192, 8192, device=lockstep.device, dtype=BF16)
    amax, key = torch.ones(1, device=lockstep.device), join_keys("speed", ["x"])
    _, slots = fp8_amax_history(x, key, True)
    for _ in range(5):
        fp8_quantize(x, amax, slots, 0, key, E4M3, "forward", "")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(50):
        fp8_quantize(x, amax, slots, 0, key, E4M3, "forward", "")
    end.record()
    lockstep.sync()
    us = begin.elapsed_time(end) * 1000 / 50
    return f"{us:.0f} us, {3 * x.numel() / us / 1e3:.0f} GB/s"


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_cast(lockstep: Lockstep, dtype: torch.dtype, format: torch.dtype) -> None:
    lockstep.note(cast(lockstep, dtype, format))


def test_captured(lockstep: Lockstep) -> None:
    lockstep.note(captured(lockstep, 5 if lockstep.quick else 40))


@pytest.mark.deadline(150)
def test_compiled(lockstep: Lockstep) -> None:
    lockstep.note(compiled(lockstep, 5 if lockstep.quick else 20))


@pytest.mark.deadline(120)
def test_modules_that_share_a_graph(lockstep: Lockstep) -> None:
    lockstep.note(first_seen_in_a_capture(lockstep))


@pytest.mark.deadline(120)
def test_ranks_agree_on_scales(lockstep: Lockstep) -> None:
    lockstep.note(ranks(lockstep))


def test_speed(lockstep: Lockstep) -> None:
    lockstep.note(speed(lockstep))
