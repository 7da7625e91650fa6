"""The command line of layer_with_overlap.py, parsed and validated."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

import torch

from ub_overlap import DDPGraphs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Validated flags of one run. Sizes are those of the whole layer, over all ranks of a tensor-parallel group."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: str
    """"cuda" or "cpu"."""
    layer: str
    """"mlp" or "block"."""
    num_layers: int
    num_replicas: int
    ddp: str
    """"outside": DDP(compile(model)); "inside": compile(DDP(model))."""
    ddp_graphs: DDPGraphs
    """torch's optimize_ddp: how graphs are split under DDP (see replicas.py)."""
    bucket_mb: float
    accumulate: int
    overlap: str
    comm_overlap: bool
    """False: run only the variant without overlap."""
    compare: bool
    """Run both variants, alternating step by step."""
    seq_length: int
    batch_size: int
    num_heads: int
    head_dim: int
    mlp_ratio: int
    dropout: float
    num_iters: int
    warmup: int
    seed: int
    dtype: torch.dtype
    fp8: bool
    """Compute linears in float8."""
    lr: float
    timeout_s: int
    verbose: bool
    options: dict[str, Any]
    """Further options of torch.compile."""

    @property
    def hidden(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def tensor_parallel(self) -> int:
        """Ranks of a tensor-parallel group."""
        return self.world // self.num_replicas


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors on rank 0 only: every rank parses the same flags."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description="A tensor-parallel layer, trained with and without overlap of communication and matmuls.")
    add = parser.add_argument
    add("--layer", choices=("mlp", "block"), default="mlp", help="LayerNorm-MLP, or a whole transformer block")
    add("--num-layers", type=int, default=1, help="layers in a row (default %(default)s)")
    add("--num-replicas", type=int, default=1, metavar="N", help="data-parallel replicas; W / N ranks share a layer")
    add("--ddp", choices=("outside", "inside"), default="outside", help="DDP(compile(model)) or compile(DDP(model))")
    add("--ddp-graphs", choices=get_args(DDPGraphs), default="no_optimization", help="see layer/replicas.py")
    add("--bucket-mb", type=float, default=25.0, help="size of DDP's gradient buckets in MiB (default %(default)s)")
    add("--accumulate", type=int, default=1, metavar="K", help="forward and backward passes a step, all but the last no_sync")
    add(
        "--overlap",
        choices=("auto", "force"),
        default="auto",
        help="collectives to hide: those predicted to gain, or all legal ones",
    )
    add("--no-comm-overlap", action="store_true", help="run only the variant without overlap")
    add("--compare", action=argparse.BooleanOptionalAction, default=True, help="run both variants side by side (default)")
    add("--seq-length", type=int, help="positions (default: 512, on GPUs 4096)")
    add("--batch-size", type=int, default=2, help="sequences of a replica (default %(default)s)")
    add("--num-heads", type=int, help="attention heads; hidden size = heads x head dim (default: 8, on GPUs 64)")
    add("--head-dim", type=int, default=64, help="channels of a head (default %(default)s)")
    add("--mlp-ratio", type=int, default=4, help="hidden size of the MLP / hidden size (default %(default)s)")
    add("--dropout", type=float, default=0.1, help="probability, after each row-parallel linear (default %(default)s)")
    add("--fp8", action="store_true", help="compute linears in float8, forward and backward, in both variants")
    add(
        "--fp8-recipe",
        choices=("tensorwise", "delayed", "rowwise"),
        help="with --fp8: scaling recipe (default tensorwise)",
    )
    add("--num-iters", type=int, default=8, help="training steps (default %(default)s)")
    add("--warmup", type=int, default=3, help="first steps that are not timed: the first one compiles (default %(default)s)")
    add("--seed", type=int, default=1234, help="of weights, data and dropout (default %(default)s)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bfloat16 on CUDA, float32 on the CPU")
    add("--lr", type=float, help="AdamW's step size (default: 0.1 / hidden size, stable at any width)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA if there is a GPU for each rank")
    add("--timeout", type=int, default=120, metavar="S", help="seconds that a process group waits for a rank")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of torch.compile; may be repeated")
    add("--verbose", action="store_true", help="every rank logs its steps, not only rank 0")
    return parser


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Return the flags of this rank, from the command line and torchrun's environment. SystemExit(2) for bad flags."""
    parser = _parser()
    args = parser.parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        parser.error("no ranks: start it with torchrun --standalone --nproc-per-node W examples/layer_with_overlap.py ...")
    world, local_world = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus < local_world:
        parser.error(f"--device cuda: {local_world} ranks on this host need as many GPUs, it has {gpus}")
    device = args.device if args.device != "auto" else "cuda" if gpus >= local_world else "cpu"
    # Small matmuls on a GPU are too short to hide communication.
    args.seq_length = args.seq_length if args.seq_length is not None else 4096 if device == "cuda" else 512
    args.num_heads = args.num_heads if args.num_heads is not None else 64 if device == "cuda" else 8
    for name in ("num_layers", "num_replicas", "accumulate", "seq_length", "batch_size", "num_heads", "head_dim",
                 "mlp_ratio", "num_iters", "timeout"):  # fmt: skip
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    if args.warmup < 0 or args.bucket_mb <= 0 or not (args.lr is None or args.lr > 0) or not 0 <= args.dropout < 1:
        parser.error("expected --warmup of at least 0, --bucket-mb and --lr above 0, --dropout from 0 to below 1")
    if world % args.num_replicas:
        parser.error(f"--num-replicas {args.num_replicas}: expected a divisor of the {world} ranks")
    args.lr = args.lr or 0.1 / (args.num_heads * args.head_dim)
    ranks = world // args.num_replicas
    for name, size in (("num-heads", args.num_heads), ("seq-length", args.seq_length)):
        if size % ranks:
            parser.error(f"--{name} {size}: expected a multiple of {ranks}, the ranks of a tensor-parallel group")
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if device == "cuda" or args.fp8 else "float32"
    options = {}
    for text in args.option:
        name, equals, value = text.partition("=")
        if not equals or name in ("overlap", "fp8"):
            parser.error(
                f"--option {text}: expected NAME=VALUE, and --overlap or --no-comm-overlap for the overlap, --fp8 for float8"
            )
        options[name] = _value(value)
    if args.fp8_recipe and not args.fp8:
        parser.error(f"--fp8-recipe {args.fp8_recipe}: expected together with --fp8")
    if args.fp8:
        options["fp8"] = {"recipe": args.fp8_recipe or "tensorwise"}
    return Flags(
        rank=int(os.environ["RANK"]), world=world, local_rank=int(os.environ["LOCAL_RANK"]), local_world=local_world,
        device=device, dtype=DTYPES[dtype], options=options, timeout_s=args.timeout,
        comm_overlap=not args.no_comm_overlap, compare=args.compare and not args.no_comm_overlap,
        **{name: getattr(args, name) for name in (
            "layer", "num_layers", "num_replicas", "ddp", "ddp_graphs", "bucket_mb", "accumulate", "overlap", "seq_length",
            "batch_size", "num_heads", "head_dim", "mlp_ratio", "dropout", "num_iters", "warmup", "seed", "lr", "verbose",
            "fp8",
        )},
    )  # fmt: skip


def _value(text: str) -> Any:
    """A JSON value (true, 4, {"backward.*": "none"}), or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
