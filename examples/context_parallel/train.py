"""Train a small language model whose sequence is spread over ranks, and print how the exchanges are overlapped.

    torchrun --nproc-per-node 2 examples/context_parallel/train.py --form ulysses --check

    --form gathered   keys and values are gathered (default)
    --form ulysses    positions are exchanged for heads

On GPUs with NCCL if there is one per rank, otherwise on the CPU with gloo. With --check each rank also trains the plain model
on the whole sequence. Exit code 0: the losses agree, or nothing was compared; 1: they differ; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ub_overlap

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llama_tp"))
from sequence_model import FORMS, Model

from data import TextBatches, load_corpus

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""The largest difference of losses: sums in another order, which training amplifies."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the settings of a run. SystemExit(2) with a message for bad arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=FORMS, default="gathered", help="how queries reach all keys (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (default %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per step (default %(default)s)")
    parser.add_argument("--seq", type=int, default=256, help="bytes of text per sequence (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks (default %(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="model dimension (default %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs, if there are enough")
    parser.add_argument("--inner", choices=("inductor", "aot_eager"), default="inductor", help="compiler of the graphs")
    parser.add_argument(
        "--overlap", choices=("auto", "split", "off"),
        help="auto: what is predicted to pay (default on GPUs); split: all exchanges (default on CPUs)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="compare the losses with training on the whole sequence")
    flags = parser.parse_args(argv)
    flags.ranks, flags.local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if flags.device == "auto":
        flags.device = "cuda" if enough else "cpu"
    elif flags.device == "cuda" and not enough:
        parser.error("--device cuda: fewer GPUs than ranks on this machine")
    if flags.ranks < 2:
        parser.error("1 rank has the whole sequence: start 2 or more ranks with torchrun")
    if flags.seq % flags.ranks:
        parser.error(f"--seq {flags.seq}: must be a multiple of the {flags.ranks} ranks")
    if flags.dim % flags.heads or (flags.form == "ulysses" and flags.heads % flags.ranks):
        parser.error(
            f"--heads {flags.heads}: must divide --dim {flags.dim}, and {flags.ranks} ranks must divide it for ulysses"
        )
    flags.dtype = torch.bfloat16 if flags.device == "cuda" else torch.float32
    flags.overlap = flags.overlap or ("auto" if flags.device == "cuda" else "split")  # on CPUs, this model is too small to pay
    flags.options = {"overlap": flags.overlap, "inner": flags.inner}
    if flags.overlap == "split":
        flags.options |= {"overlap": "off", "overrides": [{"strategy": "split"}]}
    return flags


class SequenceTraining:
    """A model and its optimizer. `forward`: the compiled model, or the model."""

    def __init__(self, model: nn.Module, forward: Callable[..., Tensor]) -> None:
        self.model, self.forward = model, forward
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)

    def step(self, tokens: Tensor, targets: Tensor, positions: Tensor, length: int, is_shared: bool) -> float:
        """Run one optimizer step. Return the loss over the whole sequence of `length` positions.

        `is_shared`: this rank has a part of it, and all ranks sum their losses and gradients.
        """
        logits = self.forward(tokens, positions)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / (len(tokens) * length)
        loss.backward()
        total = loss.detach().clone()
        if is_shared:
            dist.all_reduce(total)
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()


def build(flags: argparse.Namespace, form: str) -> Model:
    """Return the model. All ranks draw the same weights."""
    return Model(flags.dim, flags.heads, flags.layers, flags.seq, form).to(flags.device, flags.dtype)


def train(flags: argparse.Namespace) -> int:
    """Run one rank and return the exit code."""
    say: Callable[[Any], None] = (lambda text: print(text, flush=True)) if dist.get_rank() == 0 else lambda _: None
    model = build(flags, flags.form)
    run = SequenceTraining(model, torch.compile(model, backend="ub_overlap", options=flags.options))
    plain_model = build(flags, "whole")
    plain = SequenceTraining(plain_model, plain_model)
    say(f"{flags.ranks} ranks on {flags.device}, {flags.seq // flags.ranks} positions each, {flags.form}, {flags.options}")
    data = TextBatches(load_corpus(), batch=flags.batch, seq=flags.seq, seed=0)
    positions, worst = torch.arange(flags.seq, device=flags.device), 0.0
    for number in range(flags.steps):
        tokens, targets = (t.to(flags.device) for t in data.next())
        own = [t.chunk(flags.ranks, -1)[dist.get_rank()].contiguous() for t in (tokens, targets, positions)]
        # After two steps all is compiled: anything else is an error.
        with torch.compiler.set_stance("fail_on_recompile" if number > 1 else "default"):
            loss = run.step(own[0], own[1], own[2], flags.seq, is_shared=True)
        text = f"step {number}: loss {loss:.5f}"
        if flags.check:
            reference = plain.step(tokens, targets, positions, flags.seq, is_shared=False)
            text += f", on the whole sequence {reference:.5f}"
            worst = max(worst, abs(loss - reference) if math.isfinite(loss) and math.isfinite(reference) else math.inf)
        say(text)
    say(ub_overlap.reports())
    if not flags.check:
        return 0
    allowed = TOLERANCE[flags.dtype]
    say(f"the losses {'agree' if worst <= allowed else 'DO NOT AGREE'}: largest difference {worst:.1e}, allowed {allowed:.0e}")
    return 0 if worst <= allowed else 1


def main(argv: list[str] | None = None) -> int:
    flags = parse(argv)
    if flags.device == "cuda":
        torch.cuda.set_device(flags.local_rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // flags.ranks))
    dist.init_process_group("nccl" if flags.device == "cuda" else "gloo")
    try:
        return train(flags)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
