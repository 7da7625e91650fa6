"""Measure the compile time of our passes (JointPass, RewritePass) on Llama graphs of increasing depth.

    python -m benchmarks.compile_time [--layers 10 20 40 80] [--different 640] [--pack force] [--json FILE]

One process is rank 0 of 4 with torch's fake process group. The model is examples/llama_tp with tiny weights. The passes run
inside a real AOTAutograd trace of its forward and backward, and only they are timed. overlap="force" rewrites every site and
predicts none. The column "auto" is overlap="auto" with the h200 profile, which predicts every site. The last line is the time
of the selection alone, for as many sites as 80 layers have, all of different sizes and with cold caches. Times are CPU
seconds of the process, so other processes have little influence.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.cost import SiteShape, choose, load
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.passes import JointPass, RewritePass, transport
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.text.table import render_table
from ub_overlap.runtime import ops

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama_tp"))
from model import ModelArgs, Transformer
from parallelize import parallelize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40, 80])
    parser.add_argument("--different", type=int, default=640, help="number of sites of different sizes (0: none)")
    parser.add_argument("--memory-budget", type=float, help="the option memory_budget=")
    parser.add_argument("--pack", choices=("auto", "force", "off"), default="auto", help="the option pack=")
    parser.add_argument("--json")
    args = parser.parse_args()
    ops.load()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    # A fake group has no transport; the passes cost the same.
    transport.unsupported_reason = lambda *_: None  # type: ignore[assignment]
    rows = []
    for layers in args.layers:
        torch._dynamo.reset()
        mark = HISTORY.mark()
        sizes = ModelArgs(dim=64, num_layers=layers, num_heads=8, num_kv_heads=4, hidden_dim=128, max_seq_len=32)
        seconds = measure(parallelize(Transformer(sizes), mesh), torch.randint(0, 256, (2, 32)), args)
        decisions = [d for p in HISTORY.since(mark) for d in p.decisions]
        total = sum(s for name, s in seconds.items() if name != "auto s")
        row = {"layers": layers, "collectives": len(decisions), "overlapped": sum(d.overlapped for d in decisions), **seconds}
        rows.append({**row, "total s": total, "ms a layer": 1000 * total / layers})
    print(render_table(rows, floats=".3f"))
    if args.different:
        print(f"{args.different} sites of different sizes selected in {select_different(args.different):.2f} s")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


def measure(model: torch.nn.Module, tokens: torch.Tensor, args: argparse.Namespace) -> dict[str, float]:
    """Return seconds of each pass on the graphs of `model`. The unchanged graphs run afterwards."""
    options = Options(overlap="force", memory_budget=args.memory_budget, pack=args.pack)
    auto = Options(overlap="auto", memory_budget=args.memory_budget, pack=args.pack, min_bytes=0, profile="h200")
    seconds = {"joint s": 0.0, "forward s": 0.0, "backward s": 0.0, "auto s": 0.0}
    clear_caches()

    def timed(run: Any, graph: torch.fx.Graph, name: str) -> None:
        gc.collect()
        gc.disable()  # collecting the garbage of torch's tracing is not our cost
        begin = time.process_time()
        run(graph)
        seconds[name] += time.process_time() - begin
        gc.enable()

    def compiler(phase: str) -> Any:
        def compiled(gm: torch.fx.GraphModule, _: Any) -> Any:
            timed(RewritePass(options), copy.deepcopy(gm.graph), f"{phase} s")
            with unrecorded():
                timed(RewritePass(auto), copy.deepcopy(gm.graph), "auto s")
            return compat.make_boxed_func(gm.forward)

        return compiled

    def partition(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        timed(JointPass(options), gm.graph, "joint s")
        return compat.min_cut_rematerialization_partition(gm, *args, **kwargs)

    backend = compat.aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), partition_fn=partition)
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
