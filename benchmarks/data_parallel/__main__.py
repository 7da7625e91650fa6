"""Time Llama blocks under data parallelism, forward + backward: what each system adds to the compute.

    torchrun --nproc-per-node N -m benchmarks.data_parallel [--size 8b,70b] [--layers 4] [--seq 4096] [--json OUT]

The variants are those of variants.py; --ours NAME=JSON adds one of ours with these options. By default: all but fsdp2_symm
(which runs alone: --variants compute,fsdp2,fsdp2_symm), ours, and zero3, whose backward gathers every weight again as FSDP2's
does, each also with split collectives off, and zero3 with zero-copy gathers. Milliseconds, median over --iters, maximum over
ranks; the variants alternate. Hidden: the share of FSDP2's time over compute that a variant does not take. Peak memory: of a
step, over what is allocated before it. Landing memory is not in it: all variants of ours share that, and it has a column of its
own. With {"verify": true} in its options a variant prints the largest error of its sites against the plain collectives; its
times mean nothing.
--hosts N declares the ranks to be on N hosts: variants of ours then split collectives over c10d (NCCL), as across hosts.
--waterfall shows where the captured step of each variant spends its time, by class of kernel, against compute.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from ub_overlap.tools.rank_process import Deadline

from .. import facts
from ..blocks.model import SIZES
from ..ranks import end, start
from ..replay_trace import prepare_for_captures
from ..variant_run import VariantRun
from .table import text
from .variants import (
    COMPUTE,
    FSDP2,
    FSDP2_OURS,
    FSDP2_SYMM,
    INDUCTOR,
    SHARDED,
    TORCH,
    ParallelContext,
    ParallelVariant,
    differences,
    make,
    site_errors,
)

BOUND = {torch.bfloat16: 4e-2, torch.float32: 1e-3}
"""Largest allowed difference from inductor, ||a - b|| / ||b||, in any gradient."""
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours_off": {"split": "off"},
    "zero3": {"memory_budget": 0},
    "zero3_off": {"memory_budget": 0, "split": "off"},
    "zero_copy": {"memory_budget": 0, "zero_copy": "auto"},
}


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096, help="tokens of each rank; batch 1")
    parser.add_argument("--variants", help="default: compute,inductor,fsdp2 and those of ours")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=JSON", help="a variant of ours with these options")
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), help="default: inductor on CUDA, aot_eager on the CPU")
    parser.add_argument("--iters", type=int, default=15)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--forward", action="store_true", help="time the forward without gradients too; it compiles again")
    parser.add_argument("--graphs", action="store_true", help="time each as a CUDA graph too, last")
    parser.add_argument("--waterfall", action="store_true", help="take the captured steps apart, last; implies --graphs")
    parser.add_argument("--hosts", type=int, default=0, help="hosts that the ranks count as (0: the true ones)")
    parser.add_argument("--budget-s", type=float, default=0.0, help="build nothing new after this many seconds (0: no limit)")
    parser.add_argument("--deadline-s", type=float, default=240.0, help="time limit of a compilation or a round")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    args = parser.parse_args()
    args.graphs = args.graphs or args.waterfall
    named = [text.partition("=") for text in args.ours]
    args.options = {name: json.loads(options or "{}") for name, _, options in named} or OURS
    names = (args.variants or ",".join((*TORCH, FSDP2_OURS, *args.options))).split(",")
    args.variants = [n for name in names for n in (args.options if name == "ours" and args.ours else [name])]
    known = (*TORCH, FSDP2_OURS, FSDP2_SYMM, *args.options)
    if unknown := [*({*args.variants} - {*known}), *({*args.size.split(",")} - {*SIZES})]:
        parser.error(f"{', '.join(unknown)}: expected sizes of {', '.join(SIZES)} and variants of {', '.join(known)}")
    if FSDP2_SYMM in args.variants and {FSDP2_OURS, *args.options} & {*args.variants}:
        parser.error(f"{FSDP2_SYMM} sets torch's symmetric memory to NCCL's for the whole process: run it without ours")
    return args


class DataParallelRun(VariantRun):
    """One run over all sizes."""

    def size(self, size: str) -> None:
        args, world = self.args, self.world
        dtype = torch.bfloat16 if world.cuda else torch.float32
        compiler = args.compiler or ("inductor" if world.cuda else "aot_eager")
        context = ParallelContext(world, SIZES[size], args.seq, args.layers, dtype, compiler, args.options)
        rows: dict[str, Any] = {name: {"why": {}} for name in args.variants}
        row = {"size": size, "layers": args.layers, "seq": args.seq, "compiler": compiler, "variants": rows}
        self.document["rows"].append(row)
        torch._dynamo.reset()
        variants: dict[str, ParallelVariant] = {}
        for name in args.variants:
            if self.is_spent():
                rows[name]["why"]["*"] = f"--budget-s {args.budget_s:g} is spent"
            else:
                self.compile(name, lambda name=name: make(name, context), variants, rows)
        self.compare(context, variants, rows)
        for kind in ("step", "forward") if args.forward else ("step",):
            self.rounds({f"{name} {kind}": getattr(v, kind) for name, v in variants.items()}, rows)
        if args.graphs:
            uncaptured = [name for name in SHARDED if world.cuda and name in variants]
            for name in uncaptured:
                rows[name]["why"]["step_g"] = "FSDP2's hooks are not captured"
            replays = self.capture({f"{n} step": v.step for n, v in variants.items() if n not in uncaptured}, rows)
            if args.waterfall:
                self.waterfall(replays, row)

    def compare_with(
        self,
        name: str,
        reference: ParallelVariant,
        context: ParallelContext,
        variants: dict[str, ParallelVariant],
        rows: dict[str, Any],
    ) -> None:
        """Compare all results of a variant with those of another one."""
        with self.deadline(f"compare {name}"):
            errors, why = self.world.agreed(lambda: differences(variants[name], reference, self.world))
            rows[name]["worst"] = self.remove_wrong(name, errors, why, BOUND[context.dtype], variants, rows)

    def compare(self, context: ParallelContext, variants: dict[str, ParallelVariant], rows: dict[str, Any]) -> None:
        """Compare output and gradients with inductor. A variant with wrong numbers gets no times.

        FSDP2 with other collectives is compared with FSDP2. Without inductor: output and the input's gradient with compute,
        and all gradients with the first variant of ours.
        """
        reference = variants.get(INDUCTOR) or variants.get(COMPUTE)
        for name in (FSDP2_OURS, FSDP2_SYMM) if FSDP2 in variants else ():
            if name in variants:
                self.compare_with(name, variants[FSDP2], context, variants, rows)
        ours = [n for n in variants if n in self.args.options]
        first = variants[ours[0]] if ours else None
        for name in ours if reference is not None else ():
            with self.deadline(f"compare {name}"):
                errors, why = self.world.agreed(lambda name=name: differences(variants[name], reference, self.world))
                if errors and not why and INDUCTOR not in variants and first is not None:
                    more, why = self.world.agreed(lambda name=name: differences(variants[name], first, self.world))
                    errors = {**(more or {}), **errors}
            variant = variants[name]
            worst = self.remove_wrong(name, errors, why, BOUND[context.dtype], variants, rows)
            rows[name]["worst"] = worst
            if self.args.options[name].get("verify"):
                rows[name]["site_errors"] = site_errors(variant)
                self.world.say(f"{name}: {worst} {rows[name]['error']}; sites {rows[name]['site_errors']}")


def main() -> None:
    args = parse_flags()
    try:
        world = start(None, args.device)
    except ValueError as error:
        sys.exit(f"benchmarks.data_parallel: {error}")
    assert world is not None
    from ub_overlap.runtime import ops, settings

    ops.load()
    settings.configure(step_timeout_s=60, init_timeout_s=240)  # ranks compile for different times
    if args.hosts:
        settings.configure(hosts=str(world.ranks // args.hosts))
    if args.waterfall and world.cuda:
        prepare_for_captures()
    with Deadline("set-up", 120):
        document: dict[str, Any] = {"benchmark": "data_parallel", **facts.facts(world, "benchmarks.data_parallel")}
        document |= {"iters": args.iters, "hosts": args.hosts, "ours": args.options, "rows": []}
        run = DataParallelRun(args, world, document, text)
    for size in args.size.split(","):
        run.size(size)
        run.save()
    if world.rank == 0:
        print(text(document), flush=True)
    wrong = any("wrong numbers" in w for row in document["rows"] for v in row["variants"].values() for w in v["why"].values())
    end(world, 1 if wrong else 0)


if __name__ == "__main__":
    main()
