"""Measure the compile time of our passes (JointPass, RewritePass) on Llama graphs of increasing depth.

    python -m benchmarks.compile_time [--layers 10 20 40 80] [--sharded 8x1 4x2] [--experts 8 16 32] [--different 640]
        [--pack force] [--json FILE]

One process is rank 0 of 4 with torch's fake process group. The model is examples/llama_tp with tiny weights. The passes run
inside a real AOTAutograd trace of its forward and backward, and only they are timed. overlap="force" rewrites every site and
predicts none. The column "auto" is overlap="auto" with the h200 profile, which predicts every site.

The second table is overlap="auto" for Llama 8B layers whose weights are gathered in the graph, over DP x TP ranks (ZeRO-3):
decisions, rewrite and order of split sites. The third one is the same for layers with experts of 236B widths over 2 ranks,
whose sizes are symbols. The last line is the time of the selection alone, for as many sites as 80 layers have, all of different
sizes and with cold caches. Times are CPU seconds of the process, so other processes have little influence.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.cost import SiteShape, choose, load
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.passes import JointPass, RewritePass, transport
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.text.table import render_table
from ub_overlap.runtime import ops
from ub_overlap.tools.planner.models import block_input, default_dtype, parallel_blocks
from ub_overlap.tools.planner.sizes import named

from .expert_parallel.model import SIZES, ExpertLayer, make_routes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama_tp"))
from model import ModelArgs, Transformer
from parallelize import parallelize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40, 80])
    parser.add_argument(
        "--sharded", nargs="*", default=["8x1", "4x2"], help="DP x TP ranks of the second table (none: no table)"
    )
    parser.add_argument(
        "--experts", type=int, nargs="*", default=[8, 16, 32], help="layers of the third table (none: no table)"
    )
    parser.add_argument("--different", type=int, default=640, help="number of sites of different sizes (0: none)")
    parser.add_argument("--memory-budget", type=float, help="the option memory_budget=")
    parser.add_argument("--pack", choices=("auto", "force", "off"), default="auto", help="the option pack=")
    parser.add_argument("--json")
    args = parser.parse_args()
    ops.load()
    # A fake group has no transport; the passes cost the same.
    transport.unsupported_reason = lambda *_: None  # type: ignore[assignment]
    tables = {"tensor parallelism": tensor_parallel_rows(args)}
    sharded = [sharded_row(*map(int, ranks.split("x")), layers) for ranks in args.sharded for layers in args.layers]
    tables |= {"weights gathered in the graph": sharded} if sharded else {}
    tables |= {"experts": [expert_row(layers) for layers in args.experts]} if args.experts else {}
    for title, rows in tables.items():
        print(f"{title}\n{render_table(rows, floats='.3f')}")
    if args.different:
        print(f"{args.different} sites of different sizes selected in {select_different(args.different):.2f} s")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(tables, f, indent=1)


@contextlib.contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Make this process rank 0 of a fake group."""
    torch.compiler.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def tensor_parallel_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each depth of a tensor-parallel Llama over 4 ranks."""
    rows = []
    for layers in args.layers:
        mark = HISTORY.mark()
        sizes = ModelArgs(dim=64, num_layers=layers, num_heads=8, num_kv_heads=4, hidden_dim=128, max_seq_len=32)
        with fake_ranks(4):
            model = parallelize(Transformer(sizes), init_device_mesh("cpu", (4,)))
            seconds = measure(model, torch.randint(0, 256, (2, 32)), args)
        decisions = [d for p in HISTORY.since(mark) for d in p.decisions]
        total = sum(s for name, s in seconds.items() if name != "auto s")
        row = {"layers": layers, "collectives": len(decisions), "overlapped": sum(d.overlapped for d in decisions), **seconds}
        rows.append({**row, "total s": total, "ms a layer": 1000 * total / layers})
    return rows


def sharded_row(dp: int, tp: int, layers: int) -> dict[str, Any]:
    """Return the row of Llama 8B layers with weights sharded over `dp` of `dp` x `tp` ranks."""
    sizes = named("llama-8b", dp=dp, tp=tp, layers=layers)
    dims = {name: size for name, size in (("dp", dp), ("tp", tp)) if size > 1}
    with fake_ranks(dp * tp):
        mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        with compat.caches_off(), compat.FakeTensorMode():
            return {"dp": dp, "tp": tp, **predicted_row(parallel_blocks(sizes, mesh), block_input(sizes), layers)}


def expert_row(layers: int) -> dict[str, Any]:
    """Return the row of layers with 8 experts on each of 2 ranks, 4096 tokens a rank."""
    sizes = SIZES["236b"]
    routes = make_routes(4096, 16, sizes.top, "balanced", rank=0)
    fakes = compat.FakeTensorMode(allow_non_fake_inputs=True)
    with fake_ranks(2), compat.caches_off(), fakes, default_dtype(torch.bfloat16):
        blocks = [ExpertLayer(sizes, 8, _fakes_of(routes), dist.group.WORLD, has_shared=True) for _ in range(layers)]
        return predicted_row(torch.nn.Sequential(*blocks), torch.empty(4096, sizes.dim, requires_grad=True), layers)


def _fakes_of(routes: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return routes of one layer. Layers that share theirs would share the exchange of counts."""
    return torch.empty_like(routes[0]), torch.empty_like(routes[1])


def predicted_row(model: torch.nn.Module, x: torch.Tensor, layers: int) -> dict[str, Any]:
    """Return the seconds of each pass with overlap="auto" on the graphs of `model`, on fakes."""
    options = Options(overlap="auto", min_bytes=0, profile="h200")
    seconds = {"joint s": 0.0, "forward s": 0.0, "backward s": 0.0}
    mark = HISTORY.mark()
    clear_caches()

    def compiler(phase: str) -> Any:
        def compiled(gm: torch.fx.GraphModule, _: Any) -> Any:
            timed(RewritePass(options), copy.deepcopy(gm.graph), seconds, f"{phase} s")
            return compat.make_boxed_func(gm.forward)

        return compiled

    backend = _backend(compiler("forward"), compiler("backward"), JointPass(options), seconds)
    # Fakes have no counts that the host could read. Backward is compiled in front of the first run then.
    without_counts = contextlib.suppress(DataDependentOutputException)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), without_counts:
        torch.compile(model, backend=backend, dynamic=False)(x).sum().backward()
    decisions = [d for p in HISTORY.since(mark) for d in p.decisions]
    split = sum(isinstance(d.strategy, Strategy) and d.strategy.mode is Mode.SPLIT for d in decisions)
    total = sum(seconds.values())
    row = {"layers": layers, "collectives": len(decisions), "split": split, **seconds}
    return {**row, "total s": total, "ms a layer": 1000 * total / layers}


def timed(run: Any, graph: torch.fx.Graph, seconds: dict[str, float], name: str) -> None:
    """Add the CPU seconds of `run(graph)` to `seconds[name]`."""
    gc.collect()
    gc.disable()  # collecting the garbage of torch's tracing is not our cost
    begin = time.process_time()
    run(graph)
    seconds[name] += time.process_time() - begin
    gc.enable()


def _backend(forward: Any, backward: Any, joint: JointPass, seconds: dict[str, float]) -> Any:
    """Return a backend of torch.compile that calls these compilers, and times `joint`."""

    def partition(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        timed(joint, gm.graph, seconds, "joint s")
        return compat.min_cut_rematerialization_partition(gm, *args, **kwargs)

    return compat.aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)


def measure(model: torch.nn.Module, tokens: torch.Tensor, args: argparse.Namespace) -> dict[str, float]:
    """Return seconds of each pass on the graphs of `model`. The unchanged graphs run afterwards."""
    options = Options(overlap="force", memory_budget=args.memory_budget, pack=args.pack)
    auto = Options(overlap="auto", memory_budget=args.memory_budget, pack=args.pack, min_bytes=0, profile="h200")
    seconds = {"joint s": 0.0, "forward s": 0.0, "backward s": 0.0, "auto s": 0.0}
    clear_caches()

    def compiler(phase: str) -> Any:
        def compiled(gm: torch.fx.GraphModule, _: Any) -> Any:
            timed(RewritePass(options), copy.deepcopy(gm.graph), seconds, f"{phase} s")
            with unrecorded():
                timed(RewritePass(auto), copy.deepcopy(gm.graph), seconds, "auto s")
            return compat.make_boxed_func(gm.forward)

        return compiled

    backend = _backend(compiler("forward"), compiler("backward"), JointPass(options), seconds)
    torch.compile(model, backend=backend)(tokens).sum().backward()
    return seconds


def clear_caches() -> None:
    """Clear the caches of predictions, as in a new process."""
    for place in ("choice:_choose", "predict:_predict", "matmul_time:matmul_us", "matmul_time:_residual"):
        module, _, name = place.partition(":")
        getattr(importlib.import_module(f"ub_overlap.compiler.cost.{module}"), name).cache_clear()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Do not record the plans made in this context."""
    record, HISTORY.record = HISTORY.record, lambda plan: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        HISTORY.record = record  # type: ignore[method-assign]


def select_different(count: int) -> float:
    """Return seconds to select strategies for `count` sites of different sizes, half gathers, half reductions, 8 ranks."""
    profile, ranks, wide = load("h200"), 8, 14336
    shapes = []
    for deep in range(4096, 4096 + 64 * (-(-count // 2)), 64):
        shapes.append(SiteShape("all_gather_matmul", ranks, "bfloat16", ((8192, wide // ranks, deep, False),), 8192, deep))
        shapes.append(SiteShape("matmul_reduce_scatter", ranks, "bfloat16", ((8192, deep, wide // ranks, False),), 8192, deep))
    clear_caches()
    begin = time.process_time()
    for shape in shapes[:count]:
        choose(shape, profile)
    return time.process_time() - begin


if __name__ == "__main__":
    main()
