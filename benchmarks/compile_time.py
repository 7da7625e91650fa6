"""What our passes cost: time of JointPass + RewritePass on Llama graphs of growing depth.

    python -m benchmarks.compile_time [--layers 10 20 40 80] [--json FILE]

One process plays rank 0 of 4 with torch's fake process group; the model is examples/llama_tp with tiny weights. The passes
run inside a real AOTAutograd trace of its forward and backward, and only they are timed.
"""

from __future__ import annotations

import argparse
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

from ub_overlap.compiler import passes
from ub_overlap.compiler.backend import ub_overlap
from ub_overlap.compiler.history import HISTORY

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama_tp"))
from model import ModelArgs, Transformer  # noqa: E402
from parallelize import parallelize  # noqa: E402


class _Clock:
    """Adds up the seconds spent in the passes, by pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, cls: type) -> None:
        inner = cls.__call__

        def timed(this: Any, graph: Any) -> None:
            begin = time.perf_counter()
            inner(this, graph)
            name = cls.__name__ + ("" if cls is passes.JointPass else " " + passes.phase_of(graph))
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

        cls.__call__ = timed  # type: ignore[method-assign,assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40, 80])
    parser.add_argument("--save", default="gathered", choices=("gathered", "shard"))
    parser.add_argument("--json")
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    passes.transport.why_not = lambda *_: None  # type: ignore[assignment]  # a fake group has no transport, but costs as much
    clock = _Clock()
    clock.wrap(passes.JointPass)
    clock.wrap(passes.RewritePass)
    rows = []
    for layers in args.layers:
        clock.seconds.clear()
        torch._dynamo.reset()
        mark = HISTORY.mark()
        sizes = ModelArgs(dim=64, num_layers=layers, num_heads=8, num_kv_heads=4, hidden_dim=128, max_seq_len=32)
        model = parallelize(Transformer(sizes), mesh)
        _trace(model, torch.randint(0, 256, (2, 32)), {"overlap": "force", "inner": "aot_eager", "save": args.save})
        plans = HISTORY.since(mark)
        count = sum(len(p.decisions) for p in plans)
        done = sum(d.overlapped for p in plans for d in p.decisions)
        total = sum(clock.seconds.values())
        row = {"layers": layers, "collectives": count, "overlapped": done, **clock.seconds, "total": total}
        rows.append({**row, "ms a layer": 1000 * total / layers})
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


def _trace(model: torch.nn.Module, tokens: torch.Tensor, options: dict[str, Any]) -> None:
    """Forward and backward once, so that both graphs are compiled."""
    compiled = torch.compile(model, backend=lambda gm, inputs: ub_overlap(gm, inputs, options=options))
    compiled(tokens).sum().backward()


if __name__ == "__main__":
    main()
