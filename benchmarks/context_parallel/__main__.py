"""Time attention layers under context parallelism, forward + backward: what each system adds to the compute.

    torchrun --nproc-per-node N -m benchmarks.context_parallel [--size 8b,70b] [--seq 8192,32768,131072] [--json OUT]
    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --tiny --device cpu

The variants are those of variants.py: each of --systems in each of --forms; --ours NAME=JSON adds a system of ours with these
options. Milliseconds, median over --iters, maximum over ranks; the variants alternate. A variant is compared with the first of
the eager ones, output and all gradients: one with wrong numbers gets no times. Peak memory: of a step, over what is allocated
before it, without landing memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.tools.rank_process import Deadline

from .. import facts
from ..blocks.model import SIZES
from ..data_parallel.variants import ParallelVariant, differences
from ..ranks import end, start
from ..variant_run import VariantRun
from .model import FORMS
from .ring import ring_attention
from .table import text
from .variants import COMPUTE, EAGER, INDUCTOR, TRANSFORMER_ENGINE, AttentionContext, make, names_of

BOUND = {torch.bfloat16: 4e-2, torch.float32: 1e-3}
"""Largest allowed difference from eager, ||a - b|| / ||b||, in any gradient."""
OURS: dict[str, dict[str, Any]] = {"ours": {}, "off": {"overlap": "off"}}


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--seq", default="8192,32768,131072", help="tokens of the whole sequence, comma-separated; batch 1")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--forms", default=",".join(FORMS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rotation", choices=("allgather", "alltoall"), default="alltoall", help="how the ring sends")
    parser.add_argument(
        "--systems", help="default: compute, eager, inductor, those of ours, and TransformerEngine if installed"
    )
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=JSON", help="a system of ours with these options")
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), help="default: inductor on CUDA, aot_eager on the CPU")
    parser.add_argument("--iters", type=int, default=15)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--forward", action="store_true", help="time the forward without gradients too; it compiles again")
    parser.add_argument("--graphs", action="store_true", help="time each as a CUDA graph too, last")
    parser.add_argument("--tiny", action="store_true", help="a run of seconds: sizes tiny, 64 tokens, 1 layer, 2 iterations")
    parser.add_argument("--budget-s", type=float, default=0.0, help="build nothing new after this many seconds (0: no limit)")
    parser.add_argument("--deadline-s", type=float, default=240.0, help="time limit of a compilation or a round")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.tiny:
        args.size, args.seq, args.layers, args.iters, args.warm = "tiny", "64", 1, 2, 1
    named = [text.partition("=") for text in args.ours]
    args.options = {name: json.loads(options or "{}") for name, _, options in named} or OURS
    args.forms = args.forms.split(",")
    known = (COMPUTE, EAGER, INDUCTOR, *args.options, *TRANSFORMER_ENGINE)
    systems = args.systems.split(",") if args.systems else [s for s in known if s not in TRANSFORMER_ENGINE or _has_te()]
    if unknown := [*({*systems} - {*known}), *({*args.size.split(",")} - {*SIZES}), *({*args.forms} - {*FORMS})]:
        expected = f"sizes of {', '.join(SIZES)}, systems of {', '.join(known)}, forms of {', '.join(FORMS)}"
        parser.error(f"{', '.join(unknown)}: expected {expected}")
    args.variants = names_of(systems, args.forms)
    return args


def _has_te() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


class ContextParallelRun(VariantRun):
    """One run over all sizes and sequences."""

    def size(self, size: str, tokens: int) -> None:
        args, world = self.args, self.world
        dtype = torch.bfloat16 if world.cuda else torch.float32
        compiler = args.compiler or ("inductor" if world.cuda else "aot_eager")
        context = AttentionContext(world, SIZES[size], tokens, args.layers, dtype, compiler, args.options)
        rows: dict[str, Any] = {name: {"why": {}} for name in args.variants}
        self.document["rows"].append(
            {
                "size": size,
                "layers": args.layers,
                "seq": tokens,
                "compiler": compiler,
                "rotation": args.rotation,
                "variants": rows,
            }
        )
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
            self.capture({f"{name} step": v.step for name, v in variants.items()}, rows)

    def compare(self, context: AttentionContext, variants: dict[str, ParallelVariant], rows: dict[str, Any]) -> None:
        """Compare all but compute with the first eager variant. All forms compute the same."""
        first = next((name for name in variants if name.startswith(EAGER)), None)
        reference = variants[first] if first else None
        for name in [n for n in variants if reference is not None and n not in (COMPUTE, first)]:
            with self.deadline(f"compare {name}"):
                errors, why = self.world.agreed(lambda name=name: differences(variants[name], reference, self.world))
                rows[name]["worst"] = self.remove_wrong(name, errors, why, BOUND[context.dtype], variants, rows)


def main() -> None:
    args = parse_flags()
    try:
        world = start(None, args.device)
    except ValueError as error:
        sys.exit(f"benchmarks.context_parallel: {error}")
    assert world is not None
    from ub_overlap.runtime import ops, settings

    ops.load()
    compat.dynamo_config.recompile_limit = 1000  # all variants share the code of the layers
    settings.configure(step_timeout_s=60, init_timeout_s=240)  # ranks compile for different times
    with Deadline("set-up", 120):
        document: dict[str, Any] = {"benchmark": "context_parallel", **facts.facts(world, "benchmarks.context_parallel")}
        document |= {"iters": args.iters, "ours": args.options, "rows": []}
        run = ContextParallelRun(args, world, document, text)
    with ring_attention(args.rotation):
        for size in args.size.split(","):
            for tokens in args.seq.split(","):
                run.size(size, int(tokens))
                run.save()
    if world.rank == 0:
        print(text(document), flush=True)
    wrong = any("wrong numbers" in w for row in document["rows"] for v in row["variants"].values() for w in v["why"].values())
    end(world, 1 if wrong else 0)


if __name__ == "__main__":
    main()
