"""Time a Llama block, forward + backward and forward: the share of communication that each system hides.

    torchrun --nproc-per-node N -m benchmarks.blocks [--size 70b,8b] [--tp T] [--json OUT] [--ours NAME=JSON ...]

inductor: torch.compile; asynctp: with Inductor's async-TP; ours: backend="ub_overlap"; compute: one rank's compute alone, the
collectives replaced by views; nocomm: Inductor's graph with collectives that take no time, in --variants only. Hidden =
(inductor - variant) / (inductor - compute). Milliseconds, median over --iters, maximum over ranks; the variants alternate.

--mirror R times a group of R ranks on two GPUs (benchmarks/mirror): variants of ours and compute alone.
--model mlp times the block's norm and feed-forward alone. Its variants "te" and "te_fp8" are TransformerEngine's LayerNormMLP,
with weights of its own: its numbers are not compared.
--layers N times N blocks in a row, so that the host's work for a block runs while the device computes the one before.
--host shows how long the host needs for an eager step, and for each of its ops: large where the device waits for the host.
--waterfall shows where the captured step of each variant spends its time, by class of kernel, against compute; of the
rank that computes longest.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ub_overlap import _torch_compat as compat
from ub_overlap.tools.rank_process import Deadline, World

from .. import facts
from ..bounds import gradient_bound
from ..mirror import PROCESSES, note
from ..mirror.group import MirrorGroups
from ..ranks import begin, end
from ..replay_trace import prepare_for_captures
from ..report import draw
from ..variant_run import VariantRun
from . import host
from .model import MODELS, SIZES
from .profile import write_profile
from .table import BASELINES, NO_COMMUNICATION, text
from .variants import TRANSFORMER_ENGINE, BlockContext, BlockVariant, differences, make


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="70b,8b", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--model", choices=tuple(MODELS), default="block", help="a Llama block, or its norm and feed-forward")
    parser.add_argument("--seq", type=int, default=8192, help="tokens; batch 1")
    parser.add_argument("--tp", type=int, help="ranks that take part (default: all that torchrun started)")
    parser.add_argument("--mirror", type=int, metavar="R", help="time a group of R ranks on 2 GPUs (mirror mode)")
    parser.add_argument("--layers", type=int, default=1, help="blocks in a row")
    parser.add_argument("--variants", help="default: inductor,asynctp,ours,compute; in mirror mode ours,compute")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=JSON", help="a variant of ours with these options")
    parser.add_argument("--pack-weights", default="", metavar="NAMES", help="variants of ours that call ub_overlap.pack first")
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), help="default: inductor on CUDA, aot_eager on the CPU")
    parser.add_argument("--write", action="store_true", help="weights change before each step (default: a later microbatch)")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--host", action="store_true", help="measure the host time of eager steps, and of their ops")
    parser.add_argument("--graphs", action="store_true", help="time each as a CUDA graph too, last")
    parser.add_argument("--waterfall", action="store_true", help="take the captured steps apart, last; implies --graphs")
    parser.add_argument("--profile", metavar="DIR", help="write a device profile of a step of ours, on rank 0")
    parser.add_argument("--budget-s", type=float, default=0.0, help="start nothing new after this many seconds (0: no limit)")
    parser.add_argument("--deadline-s", type=float, default=240.0, help="time limit of a compilation or a round")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    parser.add_argument("--png")
    args = parser.parse_args()
    if args.mirror is not None and (args.mirror <= PROCESSES or args.tp):
        parser.error(f"--mirror {args.mirror}: expected a group of more than {PROCESSES} ranks, and no --tp")
    if args.layers < 1:
        parser.error(f"--layers {args.layers}: expected 1 or more")
    args.graphs = args.graphs or args.waterfall
    default = ("ours", "compute") if args.mirror else ("inductor", "asynctp", "ours", "compute")
    known = (*default, NO_COMMUNICATION)
    if args.model == "mlp" and not args.mirror:
        known = (*known, *TRANSFORMER_ENGINE)
    args.variants = args.variants or ",".join(default)
    named = [text.partition("=") for text in args.ours]
    args.options = {name: json.loads(options or "{}") for name, _, options in named} or {"ours": {"overlap": "auto"}}
    args.pack_weights = [name for name in args.pack_weights.split(",") if name]
    unknown = [
        *({*args.variants.split(",")} - {*known}),
        *({*args.pack_weights} - {*args.options}),
        *({*args.size.split(",")} - {*SIZES}),
    ]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected sizes of {', '.join(SIZES)} and variants of {', '.join(known)}")
    return args


class BlocksRun(VariantRun):
    """One run over all sizes, of this group or of one in mirror mode."""

    def __init__(self, args: argparse.Namespace, world: World, document: dict[str, Any]) -> None:
        super().__init__(args, world, document, text)
        self.ranks = args.mirror or world.ranks
        self.groups = MirrorGroups(world, args.mirror) if args.mirror else None

    def size(self, size: str) -> None:
        args, world = self.args, self.world
        dtype = torch.bfloat16 if world.cuda else torch.float32
        mesh = self.mesh()
        compiler = args.compiler or ("inductor" if world.cuda else "aot_eager")
        context = BlockContext(
            world, mesh, self.ranks, SIZES[size], args.seq, dtype, compiler, args.options, args.write, args.layers, args.model,
            args.pack_weights,
        )  # fmt: skip
        rows: dict[str, Any] = {}
        row = {
            "size": size,
            "model": args.model,
            "seq": args.seq,
            "layers": args.layers,
            "compiler": compiler,
            "variants": rows,
        }
        self.document["rows"].append(row)
        names = [n for name in args.variants.split(",") for n in (args.options if name == "ours" else [name])]
        torch._dynamo.reset()
        variants: dict[str, BlockVariant] = {}
        for name in names:
            rows[name] = {"why": {}}
            self.build(name, context, variants, rows)
        self.compare(context, variants, rows)
        calls = {f"{n} {what}": getattr(v, what) for n, v in variants.items() for what in ("step", "forward")}
        self.rounds(calls, rows)
        if args.host:
            self.host(variants, calls, rows)
        for name in args.options if args.profile else ():
            if name in variants:
                with self.deadline(f"profile of {name}"):
                    title = f"{size}_tp{self.ranks}_{name}"
                    message, why = world.agreed(lambda n=name, t=title: write_profile(variants[n], world, args.profile, t))
                    world.say(message or why)
        if args.graphs and not self.is_spent():
            replays = self.capture(calls, rows)
            if args.waterfall:
                self.waterfall(replays, row)

    def host(self, variants: dict[str, BlockVariant], calls: dict[str, Any], rows: dict[str, Any]) -> None:
        """Measure the host time of eager calls from an idle device."""
        with self.deadline("host times"):
            times = self.clock.host(calls, self.args.iters)
        for name, variant in variants.items():
            with self.deadline(f"host profile of {name}"):
                ops, why = self.world.agreed(lambda v=variant: host.measure_ops(v.step, self.world))
            if why:
                rows[name]["why"]["host"] = why
                continue
            rows[name]["host"] = {"step_us": times[f"{name} step"], "forward_us": times[f"{name} forward"], "ops": ops}
        self.save()

    def mesh(self) -> DeviceMesh:
        device = self.world.device.type
        if self.groups is None:
            return init_device_mesh(device, (self.ranks,))
        return DeviceMesh.from_group(compat.group_of(self.groups.new_group()), device)

    def build(self, name: str, context: BlockContext, variants: dict[str, BlockVariant], rows: dict[str, Any]) -> None:
        if name in ("asynctp", *TRANSFORMER_ENGINE) and not self.world.cuda:
            rows[name]["why"]["*"] = "needs CUDA"
            return
        if name == NO_COMMUNICATION and context.compiler != "inductor":
            rows[name]["why"]["*"] = "needs Inductor"
            return
        if context.sizes.kv_heads % self.ranks or context.tokens % self.ranks:
            rows[name]["why"]["*"] = f"{context.sizes.kv_heads} heads or {context.tokens} tokens for {self.ranks} ranks"
            return
        self.compile(name, lambda: make(name, context), variants, rows)

    def compare(self, context: BlockContext, variants: dict[str, BlockVariant], rows: dict[str, Any]) -> None:
        """Compare output and gradients with inductor. A variant with wrong numbers gets no times."""
        reference = variants.get("inductor")
        if reference is None:
            return
        for name in [n for n in variants if n not in ("inductor", *BASELINES, *TRANSFORMER_ENGINE)]:
            with self.deadline(f"compare {name}"):
                errors, why = self.world.agreed(lambda name=name: differences(variants[name], reference, self.world))
            self.remove_wrong(name, errors, why, gradient_bound(context.dtype, context.ours.get(name, {})), variants, rows)


def main() -> None:
    args = parse_flags()
    ranks = PROCESSES if args.mirror else args.tp
    world = begin("blocks", args.device, step_timeout_s=60, init_timeout_s=240, ranks=ranks)  # they compile for different times
    if args.waterfall and world.cuda:
        prepare_for_captures()
    with Deadline("set-up", 120):
        document: dict[str, Any] = {"benchmark": "blocks", **facts.facts(world, "benchmarks.blocks"), "iters": args.iters}
        document |= {"ours": args.options, "pack_weights": args.pack_weights, "rows": []}
        if args.mirror:
            document |= {"ranks": args.mirror, "mirror": note(args.mirror)}
        run = BlocksRun(args, world, document)
    for size in args.size.split(","):
        if run.is_spent():
            world.say(f"--budget-s {args.budget_s:g} is spent: no {size}")
            break
        run.size(size)
        run.save()
        gc.collect()
        if world.cuda:
            torch.cuda.empty_cache()
    if world.rank == 0:
        print(text(document), flush=True)
        if args.png:
            print(draw(document, args.png), flush=True)
    wrong = any("wrong numbers" in w for row in document["rows"] for v in row["variants"].values() for w in v["why"].values())
    end(world, 1 if wrong else 0)


if __name__ == "__main__":
    main()
