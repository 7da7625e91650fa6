"""Time all_reduce + residual + RMSNorm of few tokens, by bytes.

    torchrun --nproc-per-node N -m benchmarks.decode [--bytes 1k,16k,1m] [--hidden 8192] [--json OUT]

Columns: NCCL, torch's symmetric-memory ops (their inputs lie in symmetric memory) and ours by strategy, each with residual and
norm and alone. The others' residual and norm are one kernel of Inductor. Microseconds per call in a CUDA graph of 20 calls,
median over --iters, maximum over ranks; columns alternate. Multicast is never used.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ub_overlap.tools.rank_process import Deadline

from .. import facts
from ..ranks import end, start
from ..timing import Clock
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
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument(
        "--budget-s", type=float, default=0.0, help="measure no more sizes after this many seconds (0: no limit)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    args = parser.parse_args()
    try:
        args.sizes = [parse_bytes(size) for size in args.bytes.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--bytes: {error}")
    return args


def main() -> None:
    args = parse_flags()
    try:
        world = start(None, args.device)
    except ValueError as error:
        sys.exit(f"benchmarks.decode: {error}")
    assert world is not None
    from ub_overlap.runtime import ops, settings

    ops.load()
    settings.configure(step_timeout_s=30, init_timeout_s=120)
    begun = time.monotonic()
    dtype = torch.bfloat16 if world.cuda else torch.float32
    with Deadline("set-up", 120):
        document: dict[str, Any] = {"benchmark": "decode", **facts.facts(world, "benchmarks.decode"), "rows": []}
        group = str(dist.group.WORLD.group_name)
        clock = Clock(world)
        # The largest first: growth of the group's memory would keep the memory that graphs of smaller sizes address.
        OpSize.make(world, group, max(args.sizes), args.hidden, dtype).ours("one_shot", "rms")()
    for size in args.sizes:
        if args.budget_s and world.worst([time.monotonic() - begun])[0] > args.budget_s:
            world.say(f"--budget-s {args.budget_s:g} is spent")
            break
        with Deadline(f"{size} bytes", 120, lambda: world.say(text(document))):
            case = OpSize.make(world, group, size, args.hidden, dtype)
            document["rows"].append(measure(case, clock, args.iters, args.warm))
            world.sync()
        if world.rank == 0 and args.json:
            facts.write(args.json, document)
    if world.rank == 0:
        print(text(document), flush=True)
    wrong = any("wrong numbers" in why for row in document["rows"] for why in row["why"].values())
    end(world, 1 if wrong else 0)


if __name__ == "__main__":
    main()
