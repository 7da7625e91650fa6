"""Tests of the log, TORCH_TRACE, profiler ranges, and exposed communication of a trace."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.compiler.rank_compile import FORCE, build
from tests.harness.ranks import RankPool
from tests.harness.traces import as_loss
from tests.models.compare import uncached
from ub_overlap import __main__ as cli
from ub_overlap import _torch_compat as compat
from ub_overlap.tools import exposed


def looked(rank: int, world: int) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the artifacts and pages of a step by name, the package's profiler ranges, and the events of all_gather_matmul."""
    artifacts: dict[str, str] = {}

    def record(kind: str, metadata_fn: Callable[[], dict[str, Any]], payload_fn: Callable[[], str] = str) -> None:
        about = metadata_fn()
        page = about.get("url", "").removeprefix("file://")
        artifacts[about["name"]] = Path(page).read_text() if kind == "link" else payload_fn()

    case = build(rank, world, "tests.models.megatron", {"gated": True, "dims": 2, "local": 16})
    known, compat.trace_structured = compat.trace_structured, record
    try:
        with uncached(), tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCH_TRACE=folder):
            function = torch.compile(case.module, backend="ub_overlap", options=FORCE)
            as_loss(function(*case.inputs)).backward()
    finally:
        compat.trace_structured = known
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        as_loss(function(*case.inputs)).backward()
    names = [e.name for e in profiled.events() if e.name.startswith("ub_overlap::") and "[" in e.name]
    return artifacts, names, [e.name for e in profiled.events() if e.name == "ub_overlap::all_gather_matmul"]


def test_artifacts_and_ranges(pool2: RankPool) -> None:
    for artifacts, ranges, ops in pool2.run(looked):
        kinds = ("plan", "reasons", "diff", "page")
        assert list(artifacts) == [f"ub_overlap_{kind}_{phase}" for phase in ("forward", "backward") for kind in kinds]
        assert "<html" in artifacts["ub_overlap_page_backward"] and "backward.1" in artifacts["ub_overlap_page_backward"]
        assert json.loads(artifacts["ub_overlap_plan_forward"])["phase"] == "forward"
        assert "forward.0 all_gather_matmul: pipelined" in artifacts["ub_overlap_reasons_forward"]
        assert "all_gather + wait + 2 matmuls -> all_gather_matmul" in artifacts["ub_overlap_diff_forward"]
        assert "+matmul_reduce_scatter_default = ub_overlap" in artifacts["ub_overlap_diff_backward"]
        assert sorted(ranges) == [
            "ub_overlap::all_gather_matmul[backward.0]", "ub_overlap::all_gather_matmul[forward.0]",
            "ub_overlap::matmul_reduce_scatter[backward.1]", "ub_overlap::matmul_reduce_scatter[forward.1]",
        ]  # fmt: skip
        assert len(ops) == 2


def event(cat: str, name: str, ts: float, dur: float, stream: int = 7, pid: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "args": {"device": pid, "stream": stream}}


TRACE = [
    event("kernel", "sm90_gemm", 0, 10),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2, 10, stream=20),
    event("kernel", "void ub_overlap::cuda::(anonymous namespace)::wait_kernel(Group)", 10, 4),
    event("kernel", "sm90_gemm", 14, 6),
    event("kernel", "ncclDevKernel_AllReduce_Sum", 16, 10, stream=24),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 30, 10),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 41, 1),
    event("gpu_user_annotation", "ub_overlap::all_gather_matmul[forward.0]", 0, 15),
    event("gpu_user_annotation", "a user's range", 0, 40),
    event("cpu_op", "aten::mm", 0, 100),
    event("kernel", "sm90_gemm", 5, 1, pid=1),
    {"ph": "M", "name": "process_name"},
]


def test_exposed() -> None:
    """Device 0: communication 2..14 and 16..26; computation 0..10 and 14..20; exposed 10..14 and 20..26."""
    first, second = exposed.measure_devices(TRACE)
    assert (first.communication_us, first.compute_us, first.exposed_us) == (22, 16, 10)
    assert first.parts == {"NCCL": 10, "copies to peers": 10, "ub_overlap kernels": 4}
    assert first.sites == {"forward.0": 4} and first.hidden == pytest.approx(1 - 10 / 22)
    assert (second.communication_us, second.compute_us, second.hidden) == (0, 1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_spans(seed: int) -> None:
    """The length of the difference of two span lists equals a count over a grid of 1/100."""
    rng = torch.Generator().manual_seed(seed)
    a, b = (
        exposed.union((float(x), float(x + d)) for x, d in torch.randint(1, 40, (12, 2), generator=rng).tolist())
        for _ in range(2)
    )
    grid = [k / 100 for k in range(10_000)]

    def inside(spans: list[exposed.Span], t: float) -> bool:
        return any(x <= t < y for x, y in spans)

    counted = sum(inside(a, t) and not inside(b, t) for t in grid) / 100
    assert exposed.total(exposed.minus(a, b)) == pytest.approx(counted)


def test_exposed_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
    assert cli.main(["exposed", str(path)]) == 0
    assert "exposed 10: 55% hidden" in capsys.readouterr().out
    assert cli.main(["exposed", str(path), "--json"]) == 0
    assert [d["exposed_us"] for d in json.loads(capsys.readouterr().out)] == [10, 0]
    for text in ("no json", "{}", '{"traceEvents": []}'):
        path.write_text(text)
        assert cli.main(["exposed", str(path)]) == 2
        assert "trace" in capsys.readouterr().err
