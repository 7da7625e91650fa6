"""Time layers with experts under expert parallelism, forward + backward: what each system adds to the compute.

    torchrun --nproc-per-node N -m benchmarks.expert_parallel [--size 16b,236b] [--own 2,8] [--routing skewed] [--json OUT]
    torchrun --nproc-per-node 2 -m benchmarks.expert_parallel --tiny --device cpu

The variants are those of variants.py; --ours NAME=JSON adds one of ours with these options. vdev runs without ours (--variants
compute,eager,vdev): it sets torch's symmetric memory to NVSHMEM for the whole process. Milliseconds, median over --iters,
maximum over ranks; the variants alternate. All but compute are compared with eager, output and all gradients: one with wrong
numbers gets no times. Peak memory: of a step, over what is allocated before it, without landing memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.tools.rank_process import Deadline

from .. import facts
from ..data_parallel.variants import ParallelVariant, differences
from ..ranks import end, start
from ..variant_run import VariantRun
from .model import ROUTINGS, SIZES
from .table import text
from .variants import COMPUTE, EAGER, INDUCTOR, SYMMETRIC, ExpertContext, make

BOUND = 4e-2
"""Largest allowed difference from eager in bf16, ||a - b|| / ||b||, in any gradient."""
OURS: dict[str, dict[str, Any]] = {"ours": {}, "off": {"overlap": "off"}}


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="16b,236b", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--tokens", default="4096", help="of a rank, comma-separated")
    parser.add_argument("--own", default="2,8", help="experts of a rank, comma-separated")
    parser.add_argument("--routing", default=",".join(ROUTINGS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--no-shared", action="store_true", help="without the shared expert")
    parser.add_argument("--variants", help="default: compute, eager, inductor and those of ours")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=JSON", help="a variant of ours with these options")
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), help="default: inductor on CUDA, aot_eager on the CPU")
    parser.add_argument("--iters", type=int, default=15)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--forward", action="store_true", help="time the forward without gradients too; it compiles again")
    parser.add_argument("--tiny", action="store_true", help="a run of seconds: sizes tiny, 24 tokens, 1 layer, 2 iterations")
    parser.add_argument("--budget-s", type=float, default=0.0, help="build nothing new after this many seconds (0: no limit)")
    parser.add_argument("--deadline-s", type=float, default=240.0, help="time limit of a compilation or a round")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.tiny:
        args.size, args.tokens, args.own, args.layers, args.iters, args.warm = "tiny", "24", "2", 1, 2, 1
    named = [text.partition("=") for text in args.ours]
    args.options = {name: json.loads(options or "{}") for name, _, options in named} or OURS
    known = (COMPUTE, EAGER, INDUCTOR, SYMMETRIC, *args.options)
    args.variants = args.variants.split(",") if args.variants else [v for v in known if v != SYMMETRIC]
    sizes, routings = args.size.split(","), args.routing.split(",")
    if unknown := [*({*args.variants} - {*known}), *({*sizes} - {*SIZES}), *({*routings} - {*ROUTINGS})]:
        expected = f"sizes of {', '.join(SIZES)}, routings of {', '.join(ROUTINGS)}, variants of {', '.join(known)}"
        parser.error(f"{', '.join(unknown)}: expected {expected}")
    if SYMMETRIC in args.variants and {*args.options} & {*args.variants}:
        parser.error(f"{SYMMETRIC} sets torch's symmetric memory to NVSHMEM for the whole process: run it without ours")
    return args


class ExpertParallelRun(VariantRun):
    """One run over all layers."""

    def layer(self, size: str, tokens: int, own: int, routing: str) -> None:
        args, world = self.args, self.world
        compiler = args.compiler or ("inductor" if world.cuda else "aot_eager")
        shared = not args.no_shared
        context = ExpertContext(world, SIZES[size], tokens, args.layers, own, routing, shared, compiler, args.options)
        rows: dict[str, Any] = {name: {"why": {}} for name in args.variants}
        row = {"size": size, "layers": args.layers, "tokens": tokens, "own": own, "routing": routing, "shared": shared}
        self.document["rows"].append({**row, "compiler": compiler, "variants": rows})
        torch._dynamo.reset()
        variants: dict[str, ParallelVariant] = {}
        for name in args.variants:
            if self.is_spent():
                rows[name]["why"]["*"] = f"--budget-s {args.budget_s:g} is spent"
            else:
                self.compile(name, lambda name=name: make(name, context), variants, rows)
        self.compare(variants, rows)
        for kind in ("step", "forward") if args.forward else ("step",):
            self.rounds({f"{name} {kind}": getattr(v, kind) for name, v in variants.items()}, rows)

    def compare(self, variants: dict[str, ParallelVariant], rows: dict[str, Any]) -> None:
        """Compare all but compute with eager."""
        reference = variants.get(EAGER)
        for name in [n for n in variants if reference is not None and n not in (COMPUTE, EAGER)]:
            with self.deadline(f"compare {name}"):
                errors, why = self.world.agreed(lambda name=name: differences(variants[name], reference, self.world))
                rows[name]["worst"] = self.remove_wrong(name, errors, why, BOUND, variants, rows)


def main() -> None:
    args = parse_flags()
    try:
        world = start(None, args.device)
    except ValueError as error:
        sys.exit(f"benchmarks.expert_parallel: {error}")
    assert world is not None
    from ub_overlap.runtime import ops, settings

    ops.load()
    compat.dynamo_config.recompile_limit = 1000  # all variants share the code of the layers
    compat.dynamo_config.capture_scalar_outputs = True
    settings.configure(step_timeout_s=60, init_timeout_s=240)  # ranks compile for different times
    with Deadline("set-up", 120):
        document: dict[str, Any] = {"benchmark": "expert_parallel", **facts.facts(world, "benchmarks.expert_parallel")}
        document |= {"iters": args.iters, "ours": args.options, "rows": []}
        run = ExpertParallelRun(args, world, document, text)
    sizes, numbers = args.size.split(","), (map(int, part.split(",")) for part in (args.tokens, args.own))
    for size, tokens, own, routing in product(sizes, *numbers, args.routing.split(",")):
        run.layer(size, tokens, own, routing)
        run.save()
    if world.rank == 0:
        print(text(document), flush=True)
    wrong = any("wrong numbers" in w for row in document["rows"] for v in row["variants"].values() for w in v["why"].values())
    end(world, 1 if wrong else 0)


if __name__ == "__main__":
    main()
