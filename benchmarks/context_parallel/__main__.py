"""Time attention layers under context parallelism, forward + backward: what each system adds to the compute.

    torchrun --nproc-per-node N -m benchmarks.context_parallel [--size 8b,70b] [--seq 8192,32768,131072] [--json OUT]
    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --tiny --device cpu

The variants are those of variants.py: each of --systems in each of --forms; --ours NAME=JSON adds a system of ours with these
options. Milliseconds, median over --iters, maximum over ranks; the variants alternate. A variant is compared with the first of
the eager ones, output and all gradients: one with wrong numbers gets no times. Peak memory: of a step, over what is allocated
before it, without landing memory. --causal: causal masks, balanced over the ranks; Ulysses, whose ranks have other positions
then, is compared with eager Ulysses.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.tools.planner.ring_attention import ring_attention
from ub_overlap.tools.rank_process import World

from ..blocks.model import SIZES
from ..parallel.flags import add_graph_flags, add_run_flags, options_of
from ..parallel.run import ParallelRun, run_benchmark
from ..parallel.variant import COMPUTE, EAGER, INDUCTOR
from .model import BY_HEADS, FORMS
from .table import text
from .variants import TRANSFORMER_ENGINE, AttentionContext, make, names_of

OURS: dict[str, dict[str, Any]] = {"ours": {}, "off": {"overlap": "off"}}


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--seq", default="8192,32768,131072", help="tokens of the whole sequence, comma-separated; batch 1")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--causal", action="store_true", help="causal masks, with torch's load balance in the ring")
    forms = f"comma-separated, of {', '.join(FORMS)} (default: %(default)s)"
    parser.add_argument("--forms", default="gathered,ring,ulysses", help=forms)
    parser.add_argument("--rotation", choices=("allgather", "alltoall"), default="alltoall", help="how the ring sends")
    parser.add_argument(
        "--systems", help="default: compute, eager, inductor, those of ours, and TransformerEngine if installed"
    )
    parser.add_argument("--tiny", action="store_true", help="a run of seconds: sizes tiny, 64 tokens, 1 layer, 2 iterations")
    add_graph_flags(parser)
    add_run_flags(parser)
    args = parser.parse_args(arguments)
    if args.tiny:
        args.size, args.seq, args.layers, args.iters, args.warm = "tiny", "64", 1, 2, 1
    args.options = options_of(args.ours, OURS)
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


class ContextParallelRun(ParallelRun):
    """One run over all sizes and sequences."""

    def measure(self) -> None:
        with ring_attention(self.args.rotation, load_balance=self.args.causal):
            for size in self.args.size.split(","):
                for tokens in self.args.seq.split(","):
                    self.size(size, int(tokens))
                    self.save()

    def size(self, size: str, tokens: int) -> None:
        args = self.args
        model = (SIZES[size], tokens, args.layers, self.dtype, args.causal)
        context = AttentionContext(self.world, *model, self.compiler, args.options)
        row = self.add_row(size=size, layers=args.layers, seq=tokens, rotation=args.rotation, causal=args.causal)
        variants = self.compile_all(row, lambda name: make(name, context))
        # All forms with the same positions compute the same.
        for has_other_positions in (False, True):
            names = [n for n in variants if (args.causal and n.endswith(BY_HEADS)) == has_other_positions]
            first = next((name for name in names if name.startswith(EAGER)), None)
            if first:
                self.compare_with(first, [n for n in names if n not in (COMPUTE, first)], variants, row)
        self.time_all(variants, row)
        self.take_apart(variants, row)


def main() -> None:
    def prepare(world: World) -> None:
        compat.dynamo_config.recompile_limit = 1000  # all variants share the code of the layers

    run_benchmark("context_parallel", parse_flags(), ContextParallelRun, ContextParallelRun.measure, text, prepare)


if __name__ == "__main__":
    main()
