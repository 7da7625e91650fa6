"""The benchmark of data parallelism runs on CPU ranks and stores a complete document. No result depends on timing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.fx_passes import overlap_scheduling
from torch.utils import _runtime_estimation, flop_counter

from benchmarks.blocks.model import BlockSizes, LlamaBlock, fresh_code
from benchmarks.data_parallel import inductor_options as inductor
from benchmarks.data_parallel.__main__ import OURS_WITH_TP, DataParallelRun, parse_flags
from benchmarks.data_parallel.inductor_options import (
    INDUCTOR_OVERLAP,
    INDUCTOR_SYMM,
    count_grouped_heads,
    count_low_contention,
    inductor_options,
)
from benchmarks.data_parallel.table import text
from benchmarks.data_parallel.variants import STEPS
from benchmarks.parallel.table import hidden, row_text
from tests.harness.ranks import RankPool
from tests.test_benchmarks import FACTS, on_cpu_ranks, printed
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.tools.planner.models import shard_parameters
from ub_overlap.tools.rank_process import World


@pytest.mark.tier("full")
def test_data_parallel_on_cpu_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data_parallel.json"
    split = 'split={"overrides": [{"strategy": "split"}]}'
    arguments = [
        "--size",
        "tiny",
        "--layers",
        "2",
        "--seq",
        "32",
        "--iters",
        "2",
        "--warm",
        "1",
        "--json",
        str(path),
        "--graphs",
        "--forward",
        "--steady",
        "2",
    ]
    arguments += ["--variants", "compute,inductor,inductor_overlap,fsdp2,fsdp2_ours,ddp,ddp_ours,step,step_ours,ours"]
    out = on_cpu_ranks(2, "benchmarks.data_parallel", [*arguments, "--ours", split, "--ours", 'off={"overlap": "off"}'])
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS and document["benchmark"] == "data_parallel"
    (size,) = document["rows"]
    variants = size["variants"]
    hooked = ["fsdp2", "fsdp2_ours", "ddp", "ddp_ours"]
    names = ["compute", "inductor", "inductor_overlap", *hooked, "step", "step_ours", "split", "off"]
    assert list(variants) == names
    assert "inductor_overlap needs --compiler inductor, not aot_eager" in variants.pop("inductor_overlap")["why"]["*"]
    for name, variant in variants.items():
        assert variant["step"] > 0 and variant["step_s"] > 0 and (variant.get("forward", 0) > 0) == (name not in STEPS), name
        assert variant["why"] == {"step_g": "needs CUDA"}
    assert all(0 <= variants[name]["error"] < 1e-3 for name in ("fsdp2_ours", "ddp", "ddp_ours", *STEPS))
    assert variants["step_ours"]["sites"] == "36 none", "these sites are tiny"
    assert variants["split"]["sites"] == "36 split" and variants["off"]["sites"] == "36 none"
    assert 0 <= variants["split"]["error"] < 1e-3
    assert "tiny, 2 layers, 32 tokens" in printed(path, capsys, monkeypatch) and "36 split" in out


def measure_with_tensor_parallelism(rank: int, world: int, options: list[str]) -> dict[str, Any]:
    """Return the document of a run of 2 x 2 ranks."""
    tiny = ["--size", "tiny", "--layers", "1", "--seq", "32", "--iters", "1", "--warm", "1"]
    args = parse_flags([*tiny, "--tp", "2", "--variants", "compute,inductor,ours", *options])
    group: Any = dist.group.WORLD
    here = World(rank, world, torch.device("cpu"), group.group_name, dist.new_group(backend="gloo"))
    run = DataParallelRun(args, here, {"rows": []}, text)
    run.measure()
    return run.document


@pytest.mark.tier("full")
def test_with_tensor_parallelism(pool4: RankPool) -> None:
    """Each of both kinds of parallelism is overlapped alone: 8 collectives of activations, 20 of weights."""
    strategies = {"none": "none", "auto": "split"}
    overrides = {
        name: [{**rule, "strategy": strategies[rule["strategy"]]} for rule in OURS_WITH_TP[name]["overrides"]]
        for name in ("tp_only", "dp_only")
    }
    options = [part for name, rules in overrides.items() for part in
               ("--ours", f"{name}={json.dumps({'overlap': 'force', 'overrides': rules})}")]  # fmt: skip
    document = pool4.run(measure_with_tensor_parallelism, options)[0]
    variants = document["rows"][0]["variants"]
    assert list(variants) == ["compute", "inductor", "tp_only", "dp_only"]
    assert all(v["step"] > 0 and not v["why"] for v in variants.values())
    assert all(0 <= variants[name]["error"] < 1e-3 for name in overrides)
    assert [variants[name]["sites"] for name in overrides] == ["20 none, 8 pipelined", "8 none, 20 split"]
    assert "tiny, 1 layers, 32 tokens, TP 2" in text(document)


def measure_with_replicas(rank: int, world: int) -> tuple[dict[str, Any], list[int]]:
    """Return the document of a run of 2 replicas of shards over 2 ranks, and by plan how many all_reduces were moved."""
    tiny = ["--size", "tiny", "--layers", "1", "--seq", "32", "--iters", "1", "--warm", "1", "--replicas", "2"]
    forced = ["--ours", 'ours={"overlap": "force"}', "--ours", 'scatter_first={"overlap": "force", "scatter_first": true}']
    args = parse_flags([*tiny, "--variants", "compute,inductor,fsdp2,fsdp2_ours,step,step_ours,ours", *forced])
    group: Any = dist.group.WORLD
    here = World(rank, world, torch.device("cpu"), group.group_name, dist.new_group(backend="gloo"))
    run = DataParallelRun(args, here, {"rows": []}, text)
    mark = HISTORY.mark()
    run.measure()
    return run.document, [sum(bool(d.reordered) for d in plan.decisions) for plan in HISTORY.since(mark)]


@pytest.mark.tier("full")
def test_with_replicas(pool4: RankPool) -> None:
    """All gradients are summed over the replicas: 9 weights, an all_reduce each."""
    document, moved = pool4.run(measure_with_replicas)[0]
    variants = document["rows"][0]["variants"]
    assert list(variants) == ["compute", "inductor", "fsdp2", "fsdp2_ours", "step", "step_ours", "ours", "scatter_first"]
    assert all(v["step"] > 0 and not v["why"] for v in variants.values()), variants
    assert all(0 <= variants[name]["error"] < 1e-3 for name in ("fsdp2_ours", *STEPS, "ours", "scatter_first"))
    assert "pipelined" in variants["step_ours"]["sites"], variants["step_ours"]
    assert moved[-1] == 9 and not any(moved[:-1]), "the backward of scatter_first is the last plan"
    assert "tiny, 1 layers, 32 tokens, 2 replicas" in text(document)


@pytest.mark.parametrize("arguments", [["--variants", "ddp,ddp_ours"], ["--variants", "nonsense"]])
def test_refused_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--tp", "2", *arguments])
    assert f"{arguments[1].replace(',', ', ')}: " in capsys.readouterr().err


def test_hidden_is_a_share_of_what_fsdp2_adds() -> None:
    variants = {"compute": {"step": 10.0}, "fsdp2": {"step": 14.0}, "ours": {"step": 11.0}}
    assert hidden(variants, "ours", "step", "fsdp2") == 0.75
    assert hidden(variants, "fsdp2", "step", "fsdp2") is None and hidden({}, "ours", "step", "fsdp2") is None


def test_rivals_of_inductor_use_what_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduling = {"aten_distributed_optimizations.enable_overlap_scheduling": True}
    with_bucketing = inductor_options(INDUCTOR_OVERLAP, "inductor", is_cuda=False)
    known = inductor.known_options()
    assert with_bucketing == scheduling | {name: value for name, value in inductor.WITH_SCHEDULING.items() if name in known}
    assert with_bucketing["aten_distributed_optimizations.collective_bucketing"] is True
    torch.compile(torch.sin, options=with_bucketing)  # raises for names and types that Inductor does not take
    with pytest.raises(RuntimeError, match="needs --compiler inductor"):
        inductor_options(INDUCTOR_OVERLAP, "aot_eager", is_cuda=True)
    low_contention = {*scheduling, "aten_distributed_optimizations.enable_low_contention_collectives"}
    monkeypatch.setattr(inductor, "known_options", lambda: low_contention)
    assert inductor_options(INDUCTOR_SYMM, "inductor", is_cuda=True).keys() == low_contention
    with pytest.raises(RuntimeError, match="need CUDA"):
        inductor_options(INDUCTOR_SYMM, "inductor", is_cuda=False)
    monkeypatch.setattr(inductor, "known_options", lambda: set(scheduling))
    with pytest.raises(RuntimeError, match="has no option .*enable_low_contention_collectives"):
        inductor_options(INDUCTOR_SYMM, "inductor", is_cuda=True)
    variants = {"inductor_overlap": {"why": {}, "settings": scheduling}}
    assert f"inductor_overlap sets {json.dumps(scheduling)}" in row_text("8b", {"variants": variants}, "simple", "", str)


ATEN = torch.ops.aten
CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def refuse_grouped_heads(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Count as torch 2.11 does, roughly: AssertionError where keys or values have other heads than the queries."""
    shapes = [arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args]
    if len({shape[1] for shape in shapes if isinstance(shape, tuple) and len(shape) == 4}) > 1:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")
    return math.prod(shapes[0])


def compile_grouped_heads(rank: int, world: int, count: bool) -> tuple[str, float]:
    """Run a step with gathers in the graph and grouped heads under overlap scheduling, without a GPU.

    Its attention of the CPU is counted as that of GPUs in torch 2.11. Return the error, and the largest difference to eager
    code.
    """
    estimates = ("get_gpu_dram_gbps", lambda: 1000), ("get_device_tflops", lambda dtype: 100)
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(force_disable_caches=True):
        for name, value in estimates:
            patch.setattr(_runtime_estimation, name, value)  # they need a GPU
        patch.setattr(overlap_scheduling, "estimate_runtime_analytical", lambda node: 0.0, raising=False)  # of torch 2.11
        patch.setattr(overlap_scheduling, "get_collective_do_bench", lambda: lambda call: 0.1)
        for way in ("", "_backward"):
            patch.setitem(flop_counter.flop_registry, getattr(ATEN, CPU_ATTENTION + way), refuse_grouped_heads)
        if count:
            count_grouped_heads()
        torch.manual_seed(1)
        model = fresh_code(LlamaBlock(BlockSizes(64, 128, 8, 2)))
        shard_parameters(model, world, dist.group.WORLD)
        torch._dynamo.reset()
        call = torch.compile(model, fullgraph=True, options=inductor_options(INDUCTOR_OVERLAP, "inductor", is_cuda=False))
        found = []
        for step in (call, model):
            model.zero_grad()
            x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            try:
                out = step(x)
                out.square().mean().backward()
            except Exception as error:  # noqa: BLE001  (reported to the test)
                return str(error), -1.0
            found.append([out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        return "", max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.tier("full")
def test_overlap_scheduling_counts_grouped_heads(pool2: RankPool) -> None:
    """torch 2.11 refuses to count them, so that overlap scheduling fails."""
    for error, _ in pool2.run(compile_grouped_heads, False):
        assert "sdpa_flop_count" in error
    for error, difference in pool2.run(compile_grouped_heads, True):
        assert not error and 0 <= difference < 1e-4


def test_grouped_heads_count_as_repeated_ones() -> None:
    """Formulas that count grouped heads stay, as those of torch 2.12."""
    registry = dict(flop_counter.flop_registry)
    count_grouped_heads(registry)
    query, key = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, 2, 16, 4, device="meta")
    for name in ("flash", "efficient", "cudnn"):
        for way, first in (("", ()), ("_backward", (query,))):
            op = getattr(ATEN, f"_scaled_dot_product_{name}_attention{way}")
            grouped = registry[op](*first, query, key, key)
            assert grouped == registry[op](*first, query, query, query) > 0
    registry[ATEN._scaled_dot_product_cudnn_attention] = refuse_grouped_heads
    count_grouped_heads(registry)
    assert registry[ATEN._scaled_dot_product_cudnn_attention](query, key, key) == query.numel()
    assert registry[ATEN.mm] is flop_counter.flop_registry[ATEN.mm]


def test_low_contention_collectives_are_counted() -> None:
    """A step whose collectives torch has left alone gets no times."""
    x = torch.randn(2, 2)
    assert count_low_contention(lambda: (x @ x, x @ x), "aten::mm") == 2
    with pytest.raises(RuntimeError, match="replaced no collective"):
        count_low_contention(lambda: x @ x)
    assert all(hasattr(torch.ops.symm_mem, f"_low_contention_{name}") for name in ("all_gather", "reduce_scatter"))


@pytest.mark.tier("full")
def test_without_inductor(tmp_path: Path) -> None:
    """Variants of ours are compared with compute, whose weights are whole, and with each other. Here each rank is a host."""
    path = tmp_path / "data_parallel.json"
    arguments = [
        "--size",
        "tiny",
        "--layers",
        "1",
        "--seq",
        "32",
        "--iters",
        "2",
        "--warm",
        "1",
        "--json",
        str(path),
        "--hosts",
        "2",
    ]
    checked = 'zero3={"memory_budget": 0, "verify": true, "overrides": [{"strategy": "split"}]}'
    ours = ["--ours", 'zero3_off={"memory_budget": 0}', "--ours", checked]
    on_cpu_ranks(2, "benchmarks.data_parallel", [*arguments, "--variants", "compute,zero3_off,zero3", *ours])
    variants = json.loads(path.read_text())["rows"][0]["variants"]
    assert all(0 <= variants[name]["error"] < 1e-3 and "forward" not in variants[name] for name in ("zero3_off", "zero3"))
    assert variants["zero3"]["site_errors"]["all_gather split"] == 0.0
    assert variants["zero3"]["site_errors"]["reduce_scatter split"] < 1e-5
