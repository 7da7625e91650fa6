"""Time layers with experts under expert parallelism, forward + backward: what each system adds to the compute.

    torchrun --nproc-per-node N -m benchmarks.expert_parallel [--size 16b,236b] [--own 2,8] [--routing skewed] [--json OUT]
    torchrun --nproc-per-node 2 -m benchmarks.expert_parallel --tiny --device cpu

The variants are those of variants.py; --ours NAME=JSON adds one of ours with these options. vdev runs without ours (--variants
compute,eager,vdev) and with TORCH_SYMMMEM=NVSHMEM, for torch's symmetric memory is NVSHMEM's in the whole process then.
Milliseconds, median over --iters, maximum over ranks; the variants alternate. All but compute are compared with eager, output
and all gradients: one with wrong numbers gets no times. Peak memory: of a step, over what is allocated before it, without
landing memory.

Variants of ours have predictions of their plans: what their collectives expose, next to the measured time over compute, and
what they save against no overlap, next to what was saved of Inductor's time.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.tools.rank_process import World

from ..parallel.flags import add_run_flags, options_of
from ..parallel.run import ParallelRun, run_benchmark
from ..parallel.variant import COMPUTE, EAGER, INDUCTOR
from .model import ROUTINGS, SIZES
from .table import text
from .variants import SYMMETRIC, ExpertContext, make

OURS: dict[str, dict[str, Any]] = {"ours": {}, "halves": {"split_tokens": "force"}, "off": {"overlap": "off"}}


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="16b,236b", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--tokens", default="4096", help="of a rank, comma-separated")
    parser.add_argument("--own", default="2,8", help="experts of a rank, comma-separated")
    parser.add_argument("--routing", default=",".join(ROUTINGS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--no-shared", action="store_true", help="without the shared expert")
    parser.add_argument("--checkpoint", action="store_true", help="backward computes each layer again")
    parser.add_argument("--variants", help="default: compute, eager, inductor and those of ours")
    parser.add_argument("--tiny", action="store_true", help="a run of seconds: sizes tiny, 24 tokens, 1 layer, 2 iterations")
    parser.add_argument("--waterfall", action="store_const", const="eager", help="take the steps apart, last")
    add_run_flags(parser)
    args = parser.parse_args()
    if args.tiny:
        args.size, args.tokens, args.own, args.layers, args.iters, args.warm = "tiny", "24", "2", 1, 2, 1
    args.graphs = False  # the host reads how many tokens each expert gets
    args.options = options_of(args.ours, OURS)
    known = (COMPUTE, EAGER, INDUCTOR, SYMMETRIC, *args.options)
    args.variants = args.variants.split(",") if args.variants else [v for v in known if v != SYMMETRIC]
    sizes, routings = args.size.split(","), args.routing.split(",")
    if unknown := [*({*args.variants} - {*known}), *({*sizes} - {*SIZES}), *({*routings} - {*ROUTINGS})]:
        expected = f"sizes of {', '.join(SIZES)}, routings of {', '.join(ROUTINGS)}, variants of {', '.join(known)}"
        parser.error(f"{', '.join(unknown)}: expected {expected}")
    if SYMMETRIC in args.variants and {*args.options} & {*args.variants}:
        parser.error(f"{SYMMETRIC} needs NVSHMEM as torch's symmetric memory in the whole process: run it without ours")
    return args


class ExpertParallelRun(ParallelRun):
    """One run over all layers."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the experts, on the CPU too."""
        return torch.bfloat16

    def measure(self) -> None:
        args = self.args
        numbers = (map(int, part.split(",")) for part in (args.tokens, args.own))
        for size, tokens, own, routing in product(args.size.split(","), *numbers, args.routing.split(",")):
            self.layer(size, tokens, own, routing)
            self.save()

    def layer(self, size: str, tokens: int, own: int, routing: str) -> None:
        args, shared = self.args, not self.args.no_shared
        sizes = (SIZES[size], tokens, args.layers, own, routing, shared, args.checkpoint)
        context = ExpertContext(self.world, *sizes, self.compiler, args.options)
        facts = {"size": size, "layers": args.layers, "tokens": tokens, "own": own, "routing": routing, "shared": shared}
        row = self.add_row(**facts, checkpoint=args.checkpoint)
        variants = self.compile_all(row, lambda name: make(name, context))
        if EAGER in variants:
            self.compare_with(EAGER, [n for n in variants if n not in (COMPUTE, EAGER)], variants, row)
        self.time_all(variants, row)
        self.take_apart(variants, row)


def main() -> None:
    def prepare(world: World) -> None:
        compat.dynamo_config.recompile_limit = 1000  # all variants share the code of the layers
        compat.dynamo_config.capture_scalar_outputs = True

    run_benchmark("expert_parallel", parse_flags(), ExpertParallelRun, ExpertParallelRun.measure, text, prepare)


if __name__ == "__main__":
    main()
