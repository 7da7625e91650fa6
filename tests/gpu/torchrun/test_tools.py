"""User tools on GPUs: verify, explain with measured times, profiler ranges, `exposed` and waterfall of real traces, NVTX."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import ub_overlap
from benchmarks import waterfall
from benchmarks.replay_trace import REPLAYS, prepare_for_captures, trace_replays
from tests.gpu.cases import BF16
from tests.gpu.lockstep import Lockstep
from tests.harness.traces import as_loss
from tests.models.compare import uncached
from tests.models.megatron import MLP, Mappings
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import settings
from ub_overlap.runtime.verify import TOLERANCE
from ub_overlap.tools import exposed
from ub_overlap.tools.rank_process import World, capture_graph

FORCE: dict[str, Any] = {"overlap": "force"}


class Model(nn.Module):
    """Two tensor-parallel MLPs in bf16: four sites forward, four backward."""

    def __init__(self, lockstep: Lockstep) -> None:
        super().__init__()
        self.rows, self.dim = (4096, 4096) if lockstep.cuda else (64, 64)
        ends = Mappings("functional", 0, str(dist.group.WORLD.group_name))  # type: ignore[union-attr]
        torch.manual_seed(3 + lockstep.rank)
        with torch.device(lockstep.device):
            self.layers = nn.ModuleList(MLP(self.dim, 2 * self.dim // lockstep.ranks, ends, True, False) for _ in range(2))
        self.to(BF16)

    def input(self, lockstep: Lockstep) -> Tensor:
        generator = torch.Generator(lockstep.device).manual_seed(lockstep.rank)
        x = torch.randn(self.rows // lockstep.ranks, 1, self.dim, device=lockstep.device, generator=generator)
        return x.to(BF16).requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def verified(lockstep: Lockstep) -> str:
    """Compare every site with the plain collective and matmuls on the same inputs."""
    model = Model(lockstep)
    report = ub_overlap.explain(model, {**FORCE, "verify": True})(model.input(lockstep))
    errors = {d.id: d.error for d in report.decisions if d.overlapped}
    bad = {site: error for site, error in errors.items() if error is None or not error <= TOLERANCE[BF16]}
    if bad or len(errors) < 8 or "error" not in report.table():
        raise AssertionError(f"{len(errors)} sites, bad: {bad}")
    return f"{len(errors)} sites, error at most {max(e or 0.0 for e in errors.values()):.1e}"


def measured(lockstep: Lockstep) -> str:
    """explain(measure=True) gives every site's time, the page and the timeline."""
    model = Model(lockstep)
    report = ub_overlap.explain(model, FORCE, measure=True)(model.input(lockstep))
    times = {d.id: d.measured_us for d in report.decisions if d.overlapped}
    if len(times) < 8 or not all(us and 1 < us < 1e6 for us in times.values()):
        raise AssertionError(f"times: {times}")
    folder = Path(tempfile.mkdtemp())
    page, lanes = report.to_html(folder / "report.html"), report.timeline(folder / "timeline.json")
    if page.stat().st_size < 20_000 or Path(lanes).stat().st_size < 2_000:
        raise AssertionError("the page or the timeline is empty")
    return f"{len(times)} sites, {min(times.values()):.0f} to {max(times.values()):.0f} us"  # type: ignore[type-var]


def stepper(lockstep: Lockstep, backend: str, options: dict[str, Any]) -> tuple[Any, set[str]]:
    """Return a warmed-up compiled step and the ids of its sites."""
    model = Model(lockstep)
    torch._dynamo.reset()
    mark = HISTORY.mark()
    x = model.input(lockstep)
    run = torch.compile(model, backend=backend, options=options or None)

    def step() -> None:
        as_loss(run(x)).backward()

    with uncached():
        for _ in range(4):
            step()
    lockstep.sync()
    lockstep.barrier()
    return step, {d.id for plan in HISTORY.since(mark) for d in plan.decisions if d.overlapped}


def trace(lockstep: Lockstep, step: Any, name: str) -> tuple[Path, set[str]]:
    """Profile three steps and return the trace and the names of our ranges."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if lockstep.cuda else [])]
    with profile(activities=activities) as found:
        for _ in range(3):
            step()
        lockstep.sync()
    path = Path(os.environ.get("OUT") or tempfile.mkdtemp()) / f"{name}_rank{lockstep.rank}.json.gz"
    found.export_chrome_trace(str(path))
    return path, {e.name for e in found.events() if e.name.startswith("ub_overlap::") and "[" in e.name}


def traced(lockstep: Lockstep) -> str:
    """Ranges name the sites; `exposed` separates our communication from computation, and NCCL's in the plain graph."""
    step, sites = stepper(lockstep, "ub_overlap", FORCE)
    path, ranges = trace(lockstep, step, "ours")
    named = {name[name.index("[") + 1 : -1] for name in ranges}
    if not sites or not sites <= named:
        raise AssertionError(f"sites {sorted(sites)}, ranges {sorted(ranges)}")
    if not lockstep.cuda:
        return f"{len(ranges)} ranges"
    (ours,) = exposed.read_trace(path)
    plain_step, _ = stepper(lockstep, "inductor", {})
    (plain,) = exposed.read_trace(trace(lockstep, plain_step, "inductor")[0])
    lockstep.say(f"  ours: {ours}\n  inductor: {plain}")
    if not ours.parts.get("copies to peers") or not ours.parts.get("ub_overlap kernels") or "NCCL" in ours.parts:
        raise AssertionError(f"ours: {ours}")
    if not plain.parts.get("NCCL") or set(plain.parts) != {"NCCL"}:
        raise AssertionError(f"inductor: {plain}")
    if not sites <= set(ours.sites) or not 0 < ours.exposed_us < ours.communication_us:
        raise AssertionError(f"sites {sorted(ours.sites)} of {sorted(sites)}; {ours}")
    if not ours.hidden > plain.hidden:
        raise AssertionError(f"hidden: ours {ours.hidden:.0%}, inductor {plain.hidden:.0%}")
    return f"hidden: ours {ours.hidden:.0%}, inductor {plain.hidden:.0%}; {len(ranges)} ranges"


def taken_apart(lockstep: Lockstep) -> str:
    """The waterfall of a captured step knows its kernels: our calls, their matmuls and pushes, and no other library's."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    prepare_for_captures()
    step, sites = stepper(lockstep, "ub_overlap", FORCE)
    world = World(lockstep.rank, lockstep.ranks, lockstep.device, lockstep.group(), lockstep.control)
    replay, _ = capture_graph(step, world)
    token = torch.zeros(1, device=lockstep.device)
    steps = waterfall.measure_steps(trace_replays(replay, lambda: dist.all_reduce(token), world))
    middle = waterfall.middle_step(steps)
    text = ", ".join(f"{kind} {us:.0f}" for kind, us in sorted(middle.classes.items(), key=lambda item: -item[1]))
    if len(steps) != REPLAYS or not sites:
        raise AssertionError(f"{len(steps)} steps in the trace, {len(sites)} sites")
    if abs(sum(middle.classes.values()) - middle.total_us) > 0.01 * middle.total_us:
        raise AssertionError(f"classes add up to {sum(middle.classes.values()):.0f} of {middle.total_us:.0f} us: {text}")
    if missing := [k for k in (waterfall.OWN_MATMULS, waterfall.FLAGS, waterfall.PUSHES, "sums") if not middle.busy.get(k)]:
        raise AssertionError(f"no {missing}: {text}")
    if middle.classes.get(waterfall.OTHER, 0.0) + middle.classes.get(waterfall.NCCL, 0.0) > 0.05 * middle.total_us:
        raise AssertionError(f"{text}; {middle.kernels.get(waterfall.OTHER)}")
    return f"{middle.total_us:.0f} us: {text}"


def nvtx(lockstep: Lockstep) -> str:
    """NVTX ranges are balanced while torch emits its own."""
    if not lockstep.cuda:
        pytest.skip("needs CUDA")
    step, _ = stepper(lockstep, "ub_overlap", FORCE)
    settings.configure(nvtx=True)
    try:
        with torch.autograd.profiler.emit_nvtx():
            step()
        step()
        lockstep.sync()
    finally:
        settings.configure(nvtx=False)
    return "a step within emit_nvtx, a step without"


@pytest.mark.deadline(90)
def test_verify(lockstep: Lockstep) -> None:
    lockstep.note(verified(lockstep))


@pytest.mark.deadline(90)
def test_explain_with_measured_times(lockstep: Lockstep) -> None:
    lockstep.note(measured(lockstep))


@pytest.mark.own_gpus("times are compared with NCCL's")
@pytest.mark.deadline(120)
def test_profiler_trace_and_exposed_communication(lockstep: Lockstep) -> None:
    lockstep.note(traced(lockstep))


@pytest.mark.deadline(120)
def test_waterfall_of_a_captured_step(lockstep: Lockstep) -> None:
    lockstep.note(taken_apart(lockstep))


def test_nvtx_ranges(lockstep: Lockstep) -> None:
    lockstep.note(nvtx(lockstep))
