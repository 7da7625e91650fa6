"""Time Llama blocks under data parallelism, forward + backward: what each system adds to the compute.

    torchrun --nproc-per-node N -m benchmarks.data_parallel [--size 8b,70b] [--layers 4] [--seq 4096] [--tp N] [--json OUT]

The variants are those of variants.py; --ours NAME=JSON adds one of ours with these options. By default: compute, inductor,
fsdp2, fsdp2_ours, ours, and zero3, whose backward gathers every weight again as FSDP2's does, each also with split collectives
off, and zero3 with zero-copy gathers. fsdp2_symm runs without ours: --variants compute,fsdp2,fsdp2_symm. Milliseconds, median
over --iters, maximum over ranks; the variants alternate. Hidden: the share of FSDP2's time over compute that a variant does not
take. Peak memory: of a step, over what is allocated before it. Landing memory is not in it: all variants of ours share that,
and it has a column of its own. With {"verify": true} in its options a variant prints the largest error of its sites against the
plain collectives; its times mean nothing.
--hosts N declares the ranks to be on N hosts: variants of ours then split collectives over c10d (NCCL), as across hosts.
--replicas N shards the weights over an Nth of the ranks only (hybrid sharding); by default compute, inductor, fsdp2,
fsdp2_ours, ours, and ours with the all_reduces behind the reduce_scatters, as in FSDP2: scatter_first.
--tp N adds tensor parallelism over N ranks: by default compute, inductor, fsdp2, ours, and ours with the collectives of one
kind of parallelism left alone: tp_only, dp_only.
--waterfall shows where the step of each variant spends its time, by class of kernel, against compute.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from ub_overlap.runtime import settings
from ub_overlap.tools.rank_process import World

from ..blocks.model import SIZES
from ..bounds import gradient_bound
from ..parallel.flags import add_graph_flags, add_run_flags, options_of
from ..parallel.run import ParallelRun, run_benchmark
from ..parallel.variant import COMPUTE, INDUCTOR, ParallelVariant, differences
from .inductor_options import INDUCTOR_RIVALS
from .table import text
from .variants import (
    DDP,
    DDP_OURS,
    FSDP2,
    FSDP2_OURS,
    FSDP2_SYMM,
    HOOKED,
    RIVALS,
    STEPS,
    TORCH,
    ParallelContext,
    make,
    site_errors,
)

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours_off": {"split": "off"},
    "zero3": {"memory_budget": 0},
    "zero3_off": {"memory_budget": 0, "split": "off"},
    "zero_copy": {"memory_budget": 0, "zero_copy": "auto"},
}

WEIGHTS = "*.sharded_*"
"""The modules of the collectives of weights, also of the all_reduces of norm weights over tensor parallelism."""
OURS_WITH_TP: dict[str, dict[str, Any]] = {
    "ours": {},
    "tp_only": {"overrides": [{"module": WEIGHTS, "strategy": "none"}]},
    "dp_only": {"overrides": [{"strategy": "none"}, {"module": WEIGHTS, "strategy": "auto"}]},
}


OURS_WITH_REPLICAS: dict[str, dict[str, Any]] = {"ours": {}, "scatter_first": {"scatter_first": True}}


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sequence; batch 1 for each rank of data parallelism")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism (default: none)")
    parser.add_argument("--replicas", type=int, default=1, help="replicas of the shards (default: one)")
    parser.add_argument("--variants", help="default: compute,inductor,fsdp2 and those of ours")
    parser.add_argument("--hosts", type=int, default=0, help="hosts that the ranks count as (0: the true ones)")
    add_graph_flags(parser)
    add_run_flags(parser)
    args = parser.parse_args(arguments)
    default_of_ours = OURS_WITH_TP if args.tp > 1 else OURS_WITH_REPLICAS if args.replicas > 1 else OURS
    args.options = options_of(args.ours, default_of_ours)
    default = (*TORCH, *(() if args.tp > 1 else (FSDP2_OURS,)), *args.options)
    names = (args.variants or ",".join(default)).split(",")
    args.variants = [*dict.fromkeys(n for name in names for n in (args.options if name == "ours" and args.ours else [name]))]
    known = (*TORCH, *RIVALS, *args.options)
    if unknown := [*({*args.variants} - {*known}), *({*args.size.split(",")} - {*SIZES})]:
        parser.error(f"{', '.join(unknown)}: expected sizes of {', '.join(SIZES)} and variants of {', '.join(known)}")
    if args.tp * args.replicas > 1 and (whole := {DDP, DDP_OURS} & {*args.variants}):
        parser.error(
            f"{', '.join(sorted(whole))}: DDP takes no weights of tensor parallelism and no replicas of shards, "
            f"expected none with --tp {args.tp} --replicas {args.replicas}"
        )
    if FSDP2_SYMM in args.variants and {FSDP2_OURS, DDP_OURS, *args.options} & {*args.variants}:
        parser.error(f"{FSDP2_SYMM} sets torch's symmetric memory to NCCL's for the whole process: run it without ours")
    return args


class DataParallelRun(ParallelRun):
    """One run over all sizes."""

    def measure(self) -> None:
        replicas, tp = self.args.replicas, self.args.tp
        sizes = (replicas, self.world.ranks // (replicas * tp), tp)
        self.mesh = init_device_mesh(self.world.device.type, sizes, mesh_dim_names=("replicas", "dp", "tp"))
        for size in self.args.size.split(","):
            self.size(size)
            self.save()

    def size(self, size: str) -> None:
        args, world = self.args, self.world
        sizes = (SIZES[size], args.seq, args.layers)
        context = ParallelContext(world, self.mesh, *sizes, self.dtype, self.compiler, args.options)
        row = self.add_row(size=size, layers=args.layers, seq=args.seq, tp=args.tp, replicas=args.replicas)
        variants = self.compile_all(row, lambda name: make(name, context))
        self.compare(variants, row)
        self.time_all(variants, row)
        hooked = [name for name in HOOKED if world.cuda and name in variants]
        self.take_apart(variants, row, dict.fromkeys(hooked, "hooks of FSDP2 and DDP are not captured"))

    def compare(self, variants: dict[str, ParallelVariant], row: dict[str, Any]) -> None:
        """Compare output and gradients with inductor. A variant with wrong numbers gets no times.

        FSDP2 and DDP with other collectives are compared with FSDP2 and DDP. Without inductor: output and the input's gradient
        with compute, and all gradients with the first variant of ours. With tensor parallelism compute has no true results.
        """
        rows = row["variants"]
        ours = [n for n in variants if n in self.args.options]
        first_of_ours = variants[ours[0]] if ours else None
        reference = variants.get(INDUCTOR) or (variants.get(COMPUTE) if self.args.tp == 1 else first_of_ours)
        same = {FSDP2: (FSDP2_OURS, FSDP2_SYMM), DDP: (DDP_OURS,), INDUCTOR: (*INDUCTOR_RIVALS, DDP, *STEPS)}
        for first, names in same.items():
            if first in variants:
                self.compare_with(first, [n for n in names if n in variants], variants, row)
        for name in ours if reference is not None else ():
            if variants[name] is reference:
                continue
            with self.deadline(f"compare {name}"):
                errors, why = self.world.agreed(lambda name=name: differences(variants[name], reference, self.world))
                if errors and not why and INDUCTOR not in variants and first_of_ours is not None:
                    more, why = self.world.agreed(lambda name=name: differences(variants[name], first_of_ours, self.world))
                    errors = {**(more or {}), **errors}
            variant = variants[name]
            worst = self.remove_wrong(name, errors, why, gradient_bound(self.dtype, self.args.options[name]), variants, rows)
            rows[name]["worst"] = worst
            if self.args.options[name].get("verify"):
                rows[name]["site_errors"] = site_errors(variant)
                self.world.say(f"{name}: {worst} {rows[name]['error']}; sites {rows[name]['site_errors']}")


def main() -> None:
    args = parse_flags()

    def prepare(world: World) -> None:
        others = args.tp * args.replicas
        if world.ranks % others or (others > 1 and world.ranks == others):
            sys.exit(
                f"benchmarks.data_parallel: --tp {args.tp} --replicas {args.replicas}: expected that their product divides the "
                f"{world.ranks} ranks, and is less"
            )
        if args.hosts:
            settings.configure(hosts=str(world.ranks // args.hosts))

    run_benchmark("data_parallel", args, DataParallelRun, DataParallelRun.measure, text, prepare, hosts=args.hosts)


if __name__ == "__main__":
    main()
