"""Time ops: ours, every rival, and the floor.

    torchrun --nproc-per-node N -m benchmarks.ops [--suite quick] [--tp T] [--rows 'AG*8192'] [--json OUT] [--png OUT]

Columns (ms, median over --iters, maximum over ranks; _g: as a CUDA graph):
  gemm, nccl, push   the matmul, the collective, a copy-engine push of the same bytes, each alone (graphs)
  B                  the floor: the matmul concurrent with an independent push (graph)
  B + sum            reduce_scatters: B plus the least time of the sum, (R + 1) / R * M * N * 2 bytes at 4.2 TB/s (computed)
  seq, torch         the collective and then the matmul; torch.ops.symm_mem.fused_*
  ours S, cut S, last S   our op by strategy S; the matmul alone in its pieces; the piece that nothing hides
  ours_g keep, ours_g keep:engine   gathers that also return the gathered tensor; the second copies it by the driver

--algorithms chooses the fastest of 16 algorithms for each of our matmuls first; gemm, B, seq and torch keep torch's.
--mirror R times a group of R ranks on two GPUs (benchmarks/mirror): torchrun --nproc-per-node 2 -m benchmarks.ops --mirror 8.
There are no columns of NCCL and torch then, and every result is compared with that of two ranks in the same roles.

Rows in float8 (--suite fp8): e4m3 operands, quantized before the timing for every variant; B, seq, torch and ours in
float8 too. More columns (graphs):
  cast, ours_cast S  the quantization of a rank's activations (row scaling) alone, and our op after it
  ours_wire S        a reduce_scatter that sends float8; all others send bf16
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import torch

from ub_overlap.tools.rank_process import Deadline, World

from .. import facts
from ..mirror import PROCESSES, note
from ..mirror.collectives import MirrorCollectives
from ..mirror.group import MirrorGroups
from ..ranks import begin, end
from ..report import draw, ops_text
from .collectives import C10dCollectives
from .measure import NEEDS_CUDA, NEEDS_RANKS, OpContext, measure
from .peers import PeerPushes
from .suite import SuiteRow, load


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="h200", help="a file, or a name in benchmarks/suites (h200, fp8, quick, tiny)")
    parser.add_argument("--rows", default="*", help="comma-separated patterns of 'KIND name M'")
    parser.add_argument("--tp", type=int, help="ranks that take part (default: all that torchrun started)")
    parser.add_argument("--mirror", type=int, metavar="R", help="time a group of R ranks on 2 GPUs (mirror mode)")
    parser.add_argument("--strategies", default="", help="comma-separated (default: from the number of ranks)")
    parser.add_argument("--variants", default="*", help="comma-separated patterns of columns to time")
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--budget-s", type=float, default=0.0, help="start no row after this many seconds (0: no limit)")
    parser.add_argument("--row-deadline-s", type=float, default=60.0, help="time limit of a row; a longer row ends the run")
    parser.add_argument("--algorithms", action="store_true", help="search the algorithms of our matmuls first (CUDA)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    parser.add_argument("--png")
    args = parser.parse_args()
    if args.mirror is not None and (args.mirror <= PROCESSES or args.tp):
        parser.error(f"--mirror {args.mirror}: expected a group of more than {PROCESSES} ranks, and no --tp")
    return args


def default_strategies(ranks: int) -> list[str]:
    """Return one piece per rank, one piece, fewer and more pieces than ranks; stripes and direct for reductions."""
    counts = [c for c in sorted({1, 2, ranks // 2, 2 * ranks}) if c and c != ranks]
    return ["pipelined", *(f"pipelined:chunks={c}" for c in counts), "pipelined:stripes=2", "pipelined:stripes=4", "direct"]


def run(args: argparse.Namespace, world: World, rows: list[SuiteRow], document: dict[str, Any], context: OpContext) -> None:
    """Measure row after row into document["rows"], written to disk after each row."""
    begun = time.monotonic()
    for row in rows:
        spent = time.monotonic() - begun
        if args.budget_s and world.worst([spent])[0] > args.budget_s:
            document["left_out"] = [r.title for r in rows[len(document["rows"]) :]]
            world.say(f"--budget-s {args.budget_s:g} is spent: {len(document['left_out'])} rows left out")
            return
        clock = time.monotonic()
        with Deadline(row.title, args.row_deadline_s, lambda: world.say(ops_text(document))):
            measured, why = world.agreed(lambda row=row: measure(row, context))
        if why:
            measured = {**vars(row), "ranks": context.ranks, "ms": {}, "why": {"*": why}}
        document["rows"].append(measured)
        gc.collect()
        if world.cuda:
            torch.cuda.empty_cache()
        times = ", ".join(f"{name} {ms:.3f}" for name, ms in measured["ms"].items() if not name.startswith(("cut", "last")))
        bad = "; ".join(f"{name}: {text}" for name, text in measured["why"].items() if text not in (NEEDS_CUDA, NEEDS_RANKS))
        world.say(f"[{time.monotonic() - clock:.1f} s] {row.title}: {times}{' !! ' + bad if bad else ''}")
        if world.rank == 0 and args.json:
            facts.write(args.json, document)


def main() -> None:
    args = parse_flags()
    try:
        rows = load(args.suite, args.rows)
    except ValueError as error:
        sys.exit(f"benchmarks.ops: {error}")
    world = begin("ops", args.device, step_timeout_s=20, init_timeout_s=60, ranks=PROCESSES if args.mirror else args.tp)
    from ub_overlap.runtime.extension import extension

    gc.freeze()  # objects of imports need no collection before every capture
    with Deadline("set-up", 120):
        ranks, new_group, collectives = args.mirror or world.ranks, world.new_group, C10dCollectives(world)
        if args.mirror:
            new_group, collectives = MirrorGroups(world, ranks).new_group, MirrorCollectives(world, ranks)
        peers = PeerPushes(world, ranks, max(row.shard_bytes(ranks) for row in rows)) if world.cuda else None
        strategies = args.strategies.split(",") if args.strategies else default_strategies(ranks)
        dtype = torch.bfloat16 if world.cuda else torch.float32
        timed = (args.variants, args.iters, args.warm)
        searches = args.algorithms and world.cuda
        context = OpContext(world, dtype, strategies, *timed, peers, new_group(), collectives, new_group, searches)
        meta = facts.facts(world, "benchmarks.ops")
    document: dict[str, Any] = {
        "benchmark": "ops",
        **meta,
        **({"ranks": ranks, "mirror": note(ranks)} if args.mirror else {}),
        "dtype": str(dtype)[6:],
        "iters": args.iters,
        "strategies": strategies,
        **({"algorithms": "searched"} if searches else {}),
        "rows": [],
    }
    size = f"{ranks} ranks on {world.ranks} x {meta['devices'][0]}"
    world.say(f"torch {meta['torch']}, {size}, {len(rows)} rows, strategies {strategies}")
    run(args, world, rows, document, context)
    document["transports"] = sorted({str(s.transport) for s in extension().sessions() if s.group == context.group})
    if world.rank == 0:
        print(ops_text(document), flush=True)
        if args.json:
            facts.write(args.json, document)
        if args.png:
            print(draw(document, args.png), flush=True)
    failed = [row for row in document["rows"] if any("wrong numbers" in w for w in row["why"].values())]
    end(world, 1 if failed else 0)


if __name__ == "__main__":
    main()
