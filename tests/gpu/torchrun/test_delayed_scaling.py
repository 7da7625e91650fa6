"""Delayed scaling: the kernels of histories equal the CPU bitwise; captured calls; compiled models with and without graphs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from tests.fp8.rank_fp8 import run_microbatches, run_unequal_ranks
from tests.gpu import captures
from tests.gpu.cases import BF16
from tests.gpu.lockstep import Lockstep
from tests.models.case import on
from ub_overlap import fp8_state
from ub_overlap.runtime import errors
from ub_overlap.runtime.fp8.amax_history import CAPACITY, LENGTH, join_keys
from ub_overlap.runtime.ops import load

load()
advance = torch.ops.ub_overlap.fp8_advance_histories.default
record = torch.ops.ub_overlap.fp8_raise_amax.default
fp8_amax_history = torch.ops.ub_overlap.fp8_amax_history.default
fp8_record_amax = torch.ops.ub_overlap.fp8_record_amax.default

COUNTS = (1, 2, 127, 128, 129, 1000, CAPACITY)


def same(a: Tensor, b: Tensor) -> bool:
    """Compare bitwise; all NaNs are equal."""
    return torch.equal(a.float().nan_to_num(nan=12345.0), b.float().nan_to_num(nan=12345.0))


def updates(lockstep: Lockstep) -> str:
    """Record and advance histories of several numbers of tensors: one step more than a history holds, some without a record."""
    for count in COUNTS:
        torch.manual_seed(count)
        slots = torch.randperm(CAPACITY)[:count]
        theirs = torch.zeros(CAPACITY), torch.zeros(LENGTH, CAPACITY)
        ours = tuple(t.to(lockstep.device) for t in theirs)
        scale, on_device = torch.rand(()), slots.to(lockstep.device)
        for turn in range(LENGTH + 1):
            for _ in range(2):
                index, sample = int(torch.randint(count, ())), torch.rand(())
                copy = record(ours[0], on_device, index, None, scale.to(lockstep.device), sample.to(lockstep.device))
                record(theirs[0], slots, index, None, scale, sample)
                assert torch.equal(copy.cpu(), scale)
            is_step = turn % 5 != 4
            (mine, slots_copy), (wanted, _) = advance(*ours, on_device, is_step), advance(*theirs, slots, is_step)
            assert torch.equal(mine.cpu(), wanted), f"{count} tensors, call {turn}"
            assert torch.equal(slots_copy.cpu(), slots) and slots_copy.data_ptr() != on_device.data_ptr()
            assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)), f"{count} tensors, call {turn}"
    return f"{len(COUNTS)} counts, bitwise"


def recorded(lockstep: Lockstep) -> str:
    """Record casts of many sizes, transposed and shifted ones too: the largest element at either end, and all codes."""
    slots, scale = torch.tensor([5, 3], device=lockstep.device), torch.tensor(0.37, device=lockstep.device)
    sizes = ((1,), (15,), (16,), (17,), (127, 3), (4096, 48), (1003, 1001), (8192, 7168))
    for format in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256, device=lockstep.device, dtype=torch.uint8)
        for shape in sizes:
            whole = codes[torch.randint(256, (*shape, 1), device=lockstep.device)][..., 0]
            quiet = whole & 0x8F  # no large exponents
            quiet.view(-1)[-1] = 0x71
            first = quiet.flip(tuple(range(len(shape)))).contiguous()
            shifted = whole.new_empty(whole.numel() + 1)[1:].view(shape).copy_(quiet)
            for case in (whole, quiet, first, shifted, quiet.t() if len(shape) == 2 else quiet, torch.zeros_like(whole)):
                ours, theirs = torch.zeros(8, device=lockstep.device), torch.zeros(8)
                for sample in (0.0, 3.0):
                    sampled = torch.tensor(sample, device=lockstep.device)
                    args = slots, 1, case.view(format), scale, sampled
                    assert torch.equal(record(ours, *args), scale)
                    record(theirs, *(a.cpu() if isinstance(a, Tensor) else a for a in args))
                    assert torch.equal(ours.cpu(), theirs), (format, shape, sample, ours[3], theirs[3])
    return f"{len(sizes)} sizes, bitwise"


def captured(lockstep: Lockstep, turns: int) -> str:
    """Replays of a captured call with changing inputs leave the histories of eager calls."""
    if not lockstep.cuda:
        pytest.skip("there is nothing to capture on the CPU")
    inputs = [torch.randn(256, 512, device=lockstep.device, dtype=BF16) * (1 + turn % 5) for turn in range(turns)]
    static, weight = inputs[0].clone(), torch.ones(1, device=lockstep.device)

    def call(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        keys = join_keys(name, ["x", "y"])
        amax, slots = fp8_amax_history(weight, keys, True)
        unit, cast = x.abs().amax().float() / 448, (448 * x.float() / x.abs().amax().float()).to(torch.float8_e4m3fn)
        scale = fp8_record_amax(unit, cast, x[0].abs().amax().float(), slots, 0, join_keys(name, ["x"]), "forward")
        fp8_record_amax(unit, None, 2 * x.abs().amax().float(), slots, 1, join_keys(name, ["y"]), "backward")
        return amax, scale

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


class Gated(nn.Module):
    """A norm and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(512)
        self.w1, self.w3, self.w2 = (nn.Linear(*sizes, bias=False) for sizes in ((512, 1024), (512, 1024), (1024, 512)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def kernels_with_casts(code: str) -> list[tuple[str, int]]:
    """Return (heuristics, stored float8 tensors) of Inductor's kernels that read 16 bits and store float8."""
    kernels = []
    for body in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code, re.DOTALL):
        signature = re.search(r"'signature': (\{.*?\})", body)
        heuristics = re.search(r"@triton_heuristics\.(\w+)", body)
        assert signature is not None and heuristics is not None, body[:500]
        pointers = signature.group(1)
        stored = re.findall(r"'out_ptr\d+': '\*fp8", pointers)
        if stored and re.search(r"'in_ptr\d+': '\*bf16'", pointers):
            kernels.append((heuristics.group(1), len(stored)))
    return kernels


def fused(lockstep: Lockstep) -> str:
    """Kernels that cast store transposed copies too: of the activation, of the output's gradient, and of both gradients of the
    gated product. That of a norm does not, as it may reduce rows."""
    if not lockstep.cuda:
        pytest.skip("Inductor's kernels for the CPU have another form")
    torch.manual_seed(3)
    captures.reset()
    model = Gated().to(lockstep.device, BF16)
    options = {"fp8": {"recipe": "delayed", "state": "fused"}, "overlap": "force"}
    run: Any = torch.compile(model, backend="ub_overlap", options=options)
    x = torch.randn(2048, 512, device=lockstep.device).to(BF16)
    with torch.compiler.config.patch(force_disable_caches=True):  # a cached graph generates no code
        _, codes = run_and_get_code(captures.step, run, model, x)
    kernels = kernels_with_casts("".join(codes))
    assert all(kind == "pointwise" for kind, _ in kernels), kernels
    assert sorted(stored for _, stored in kernels) == [1, 2, 2, 4], kernels
    return f"{len(kernels)} kernels cast: {kernels}"


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


def test_updates(lockstep: Lockstep) -> None:
    lockstep.note(updates(lockstep))


def test_recorded(lockstep: Lockstep) -> None:
    lockstep.note(recorded(lockstep))


def test_captured(lockstep: Lockstep) -> None:
    lockstep.note(captured(lockstep, 5 if lockstep.quick else 40))


@pytest.mark.deadline(150)
def test_compiled(lockstep: Lockstep) -> None:
    lockstep.note(compiled(lockstep, 5 if lockstep.quick else 20))


@pytest.mark.deadline(150)
def test_fused(lockstep: Lockstep) -> None:
    lockstep.note(fused(lockstep))


@pytest.mark.deadline(120)
def test_modules_that_share_a_graph(lockstep: Lockstep) -> None:
    lockstep.note(first_seen_in_a_capture(lockstep))


@pytest.mark.deadline(120)
def test_ranks_agree_on_scales(lockstep: Lockstep) -> None:
    lockstep.note(ranks(lockstep))
