"""Time all_reduce + residual + RMSNorm of few tokens, by bytes; or with --layers the layers of a decode step.

    torchrun --nproc-per-node N -m benchmarks.decode [--bytes 1k,16k,1m] [--hidden 8192] [--json OUT]
    torchrun --nproc-per-node N -m benchmarks.decode --layers 8 [--size 8b,70b] [--batch 1,16,64] [--json OUT]

Columns of single ops: NCCL, torch's symmetric-memory ops (their inputs lie in symmetric memory) and ours by strategy, each
with residual and norm and alone. The others' residual and norm are one kernel of Inductor. Microseconds per call in a CUDA
graph of 20 calls, median over --iters, maximum over ranks; columns alternate. Multicast is never used. --mirror R times ours in
a group of R ranks on two GPUs (benchmarks/mirror).

Layers: --layers of a Llama in a row, one token of each of B sequences, with a cache of --context tokens (layers.py). --tiny
shows on CPU ranks that the program works.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist

from ub_overlap.tools.rank_process import Deadline, World

from .. import facts
from ..blocks.model import SIZES as MODEL_SIZES
from ..mirror import PROCESSES, note
from ..mirror.group import MirrorGroups
from ..ranks import begin, end
from ..timing import Clock
from .layers import LayersRun
from .single_op import OpSize, measure
from .table import text

UNITS = {"k": 1 << 10, "m": 1 << 20}
SIZES = "1k,4k,16k,64k,256k,1m,2m,4m,16m"


def parse_bytes(value: str) -> int:
    """Return the bytes of "16k" or "1m"."""
    try:
        return int(value[:-1]) * UNITS[value[-1:].lower()]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"got {value!r}, expected a number and k or m: 16k, 1m") from None


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default=SIZES, help="comma-separated sizes of the reduced tensor")
    parser.add_argument("--hidden", type=int, default=8192, help="numbers of a row")
    parser.add_argument("--mirror", type=int, default=0, metavar="R", help="time a group of R ranks on 2 GPUs (mirror mode)")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="time N layers of a decode step")
    parser.add_argument("--size", default="8b,70b", help=f"of the layers, comma-separated, of {', '.join(MODEL_SIZES)}")
    parser.add_argument("--batch", default="1,16,64", help="sequences, comma-separated")
    parser.add_argument("--context", type=int, default=512, help="tokens of a sequence in the cache")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=JSON", help="a variant of ours with these options")
    parser.add_argument("--pack-weights", action="store_true", help="call ub_overlap.pack first, which variants of ours use")
    parser.add_argument("--tiny", action="store_true", help="tiny layers, batch 3, decisions of an H200; for the CPU")
    parser.add_argument("--deadline-s", type=float, default=240.0, help="time limit of a compilation or a round of layers")
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument(
        "--budget-s", type=float, default=0.0, help="measure no more sizes after this many seconds (0: no limit)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.size, args.batch, args.context = args.layers or 2, "tiny", "3", 8
    named = [text.partition("=") for text in args.ours]
    args.options = {name: json.loads(options or "{}") for name, _, options in named}
    args.options = args.options or {"ours": {"profile": "h200"} if args.tiny else {}}
    if args.layers < 0 or {*args.size.split(",")} - {*MODEL_SIZES}:
        parser.error(f"--layers {args.layers}, --size {args.size}: expected 0 or more, and sizes of {', '.join(MODEL_SIZES)}")
    if args.mirror and (args.mirror <= PROCESSES or args.layers):
        parser.error(f"--mirror {args.mirror}: expected a group of more than {PROCESSES} ranks, and no --layers")
    args.batches = [int(batch) for batch in args.batch.split(",")]
    try:
        args.sizes = [parse_bytes(size) for size in args.bytes.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--bytes: {error}")
    return args


def main() -> None:
    args = parse_flags()
    world = begin("decode", args.device, step_timeout_s=30, init_timeout_s=120)
    if args.layers:
        end(world, measure_layers(args, world))
    end(world, measure_ops(args, world))


def measure_layers(args: argparse.Namespace, world: World) -> int:
    """Measure layers. Return the exit code."""
    with Deadline("set-up", 120):
        document: dict[str, Any] = {"benchmark": "decode", **facts.facts(world, "benchmarks.decode"), "rows": [], "layers": []}
        document["ours"] = args.options
        run = LayersRun(args, world, document)
    for size in args.size.split(","):
        run.size(size)
    run.save()
    if world.rank == 0:
        print(text(document), flush=True)
    whys = [why for row in document["layers"] for variant in row["variants"].values() for why in variant["why"].values()]
    return 1 if any("wrong numbers" in why for why in whys) else 0


def measure_ops(args: argparse.Namespace, world: World) -> int:
    """Measure single ops. Return the exit code."""
    begun = time.monotonic()
    dtype = torch.bfloat16 if world.cuda else torch.float32
    with Deadline("set-up", 120):
        document: dict[str, Any] = {"benchmark": "decode", **facts.facts(world, "benchmarks.decode"), "rows": []}
        group = str(dist.group.WORLD.group_name)
        if args.mirror:
            group = MirrorGroups(world, args.mirror).new_group()
            document |= {"ranks": args.mirror, "mirror": note(args.mirror)}
        clock = Clock(world)
        # The largest first: growth of the group's memory would keep the memory that graphs of smaller sizes address.
        OpSize.make(world, group, max(args.sizes), args.hidden, dtype).ours("one_shot", "rms")()
    for size in args.sizes:
        if args.budget_s and world.worst([time.monotonic() - begun])[0] > args.budget_s:
            world.say(f"--budget-s {args.budget_s:g} is spent")
            break
        with Deadline(f"{size} bytes", 120, lambda: world.say(text(document))):
            case = OpSize.make(world, group, size, args.hidden, dtype, args.mirror)
            document["rows"].append(measure(case, clock, args.iters, args.warm))
            world.sync()
        if world.rank == 0 and args.json:
            facts.write(args.json, document)
    if world.rank == 0:
        print(text(document), flush=True)
    return 1 if any("wrong numbers" in why for row in document["rows"] for why in row["why"].values()) else 0


if __name__ == "__main__":
    main()
