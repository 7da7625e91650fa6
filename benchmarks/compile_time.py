"""What our passes cost: time of JointPass + RewritePass on Llama graphs of growing depth.

    python -m benchmarks.compile_time [--layers 10 20 40 80] [--json FILE]

One process plays rank 0 of 4 with torch's fake process group; the model is examples/llama_tp with tiny weights. The passes
run inside a real AOTAutograd trace of its forward and backward, and only they are timed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.history import HISTORY
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.passes import JointPass, RewritePass, transport
from ub_overlap.runtime import ops

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama_tp"))
from model import ModelArgs, Transformer
from parallelize import parallelize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40, 80])
    parser.add_argument("--save", default="gathered", choices=("gathered", "shard"))
    parser.add_argument("--json")
    args = parser.parse_args()
    ops.load()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    transport.why_not = lambda *_: None  # type: ignore[assignment]  # a fake group has no transport, but costs as much
    rows = []
    for layers in args.layers:
        torch._dynamo.reset()
        mark = HISTORY.mark()
        sizes = ModelArgs(dim=64, num_layers=layers, num_heads=8, num_kv_heads=4, hidden_dim=128, max_seq_len=32)
        seconds = measure(parallelize(Transformer(sizes), mesh), torch.randint(0, 256, (2, 32)), args.save)
        decisions = [d for p in HISTORY.since(mark) for d in p.decisions]
        total = sum(seconds.values())
        row = {"layers": layers, "collectives": len(decisions), "overlapped": sum(d.overlapped for d in decisions), **seconds}
        rows.append({**row, "total s": total, "ms a layer": 1000 * total / layers})
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


def measure(model: torch.nn.Module, tokens: torch.Tensor, save: str) -> dict[str, float]:
    """Seconds of each pass on the joint, forward and backward graphs of `model`. The graphs as they were are what then runs."""
    options = Options(overlap="force", save=save)  # type: ignore[arg-type]
    seconds = {"joint s": 0.0, "forward s": 0.0, "backward s": 0.0}

    def timed(run: Any, graph: torch.fx.Graph, name: str) -> None:
        gc.collect()
        gc.disable()  # a collection of what torch's own tracing left behind is not our cost
        begin = time.perf_counter()
        run(graph)
        seconds[name] += time.perf_counter() - begin
        gc.enable()

    def compiler(phase: str) -> Any:
        def compiled(gm: torch.fx.GraphModule, _: Any) -> Any:
            timed(RewritePass(options), copy.deepcopy(gm.graph), f"{phase} s")
            return compat.make_boxed_func(gm.forward)

        return compiled

    def partition(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        timed(JointPass(options), gm.graph, "joint s")
        return compat.min_cut_rematerialization_partition(gm, *args, **kwargs)

    backend = compat.aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), partition_fn=partition)
    torch.compile(model, backend=backend)(tokens).sum().backward()
    return seconds


if __name__ == "__main__":
    main()
