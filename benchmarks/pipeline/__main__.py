"""Time messages between two ranks, and steps of pipeline schedules, over c10d (NCCL) and over our channels.

    torchrun --nproc-per-node 2 -m benchmarks.pipeline [--mib 1,16,64] [--schedules 1F1B,ZBVZeroBubble] [--compile] [--json OUT]

Messages: alone, together with matmuls that take about as long, and what matmuls lose while messages run. Steps: forward and
backward of MLP stages in bf16; with --compile also stages that send before weight gradients (pipeline.Stage).
Milliseconds, median over --iters, maximum over ranks; the transports alternate.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ub_overlap.runtime.session import channels
from ub_overlap.tools.rank_process import Deadline

from .. import facts
from ..ranks import end, start
from . import messages, steps
from .table import text


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="1,16,64", help="sizes of messages in MiB; empty: none")
    parser.add_argument("--schedules", default="1F1B,Interleaved1F1B", help="of torch.distributed.pipelining; empty: none")
    parser.add_argument("--width", default="2048,4096,8192", help="widths of the stages")
    parser.add_argument("--tokens", type=int, default=4096, help="of a microbatch")
    parser.add_argument("--layers", type=int, default=1, help="of a stage")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="compile the stages, and add those that defer weight gradients")
    parser.add_argument("--piece-mib", type=int, help="the most MiB of a piece of a message (default 16)")
    parser.add_argument("--iters", type=int, default=15)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--deadline-s", type=float, default=120.0, help="time limit of a row")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    return parser.parse_args()


def main() -> None:
    args = parse_flags()
    world = start(device=args.device)
    assert world is not None, "all ranks of torchrun take part"
    if world.ranks < 2:
        raise ValueError("pipeline parallelism needs two ranks or more: start with torchrun --nproc-per-node 2")
    if args.piece_mib:
        channels.PIECE_BYTES = args.piece_mib << 20
    document: dict[str, Any] = {
        "benchmark": "pipeline",
        **facts.facts(world, "benchmarks.pipeline"),
        "rows": [],
    }

    def keep() -> None:
        if world.rank == 0 and args.json:
            facts.write(args.json, document)

    for mib in filter(None, args.mib.split(",")):
        for both in (False, True):
            with Deadline(f"{mib} MiB", args.deadline_s):
                document["rows"].append(messages.measure(world, int(mib) << 20, both, args.iters, args.warm))
            keep()
    for schedule in filter(None, args.schedules.split(",")):
        for width in map(int, args.width.split(",")):
            with Deadline(f"{schedule} {width}", args.deadline_s):
                sizes = (width, args.tokens, args.layers, args.microbatches)
                document["rows"].append(steps.measure(world, schedule, *sizes, args.iters, args.warm, args.compile))
            keep()
    world.say(text(document))
    end(world, 0)


if __name__ == "__main__":
    sys.exit(main())
