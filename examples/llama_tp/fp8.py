"""Train a small Llama on real text in bf16 and in float8, both through ub_overlap, and compare the loss curves.

    python examples/llama_tp/fp8.py [--ranks 2] [--steps 300] [--recipe tensorwise] [--figure docs/fp8_training.png]

Both start from the same weights and see the same bytes. Only options={"fp8": ...} differs, with a filter that leaves
the language-model head in bf16, as is usual. The step size rises over the first tenth and falls to zero. Exit code 0: the
losses of the last tenth of the steps, in the mean, differ by 1% at most; 1: they do not; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from console import plot
from data import TextBatches, load_corpus
from model import ModelArgs
from train import Trainer, TrainingSettings, build, start
from ub_overlap import reports
from ub_overlap.cli.progress import show_progress

BOUND = 0.01


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama in bf16 and in float8, side by side.")
    parser.add_argument("--ranks", type=int, default=2, help="processes, each with its shard of a layer (default %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default %(default)s)")
    parser.add_argument("--dim", type=int, default=256, help="model dimension, a multiple of 64 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks (default %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step (default %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="bytes of text per sequence (default %(default)s)")
    parser.add_argument("--recipe", default="tensorwise", help="recipe of the option fp8 (default %(default)s)")
    parser.add_argument("--overlap", choices=("force", "off"), default="force", help="which sites (default %(default)s)")
    parser.add_argument(
        "--inner", choices=("inductor", "aot_eager"), default="inductor", help="compiler of the rewritten graph"
    )
    parser.add_argument("--figure", type=Path, help="draw the curves to this file (needs matplotlib)")
    parser.add_argument("--data", type=Path, help="write the losses to this file as JSON")
    flags = parser.parse_args(argv)
    if min(flags.ranks, flags.steps, flags.layers, flags.batch, flags.seq) < 1 or flags.dim % 64:
        parser.error("expected sizes of at least 1, and --dim a multiple of 64")
    return flags


def blocks_only(module: str, shape: tuple[int, int]) -> bool:
    """The filter of the option fp8: linears of blocks, not the head."""
    return module.startswith("layers.")


blocks_only.key = "blocks"  # type: ignore[attr-defined]  # names it for compile caches


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, as a share of the maximum."""
    rise = max(1, steps // 10)
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def run_rank(rank: int, flags: argparse.Namespace, rendezvous: str, results: Any) -> None:
    """Run both trainings on one rank, alternating step by step."""
    common = {"overlap": flags.overlap, "inner": flags.inner}
    args = ModelArgs(dim=flags.dim, num_layers=flags.layers, hidden_dim=3 * flags.dim, max_seq_len=flags.seq)
    settings = TrainingSettings(
        ranks=flags.ranks, device="cuda" if torch.cuda.device_count() >= flags.ranks else "cpu", steps=flags.steps,
        batch=flags.batch, seq=flags.seq, args=args, options=common, dtype=torch.bfloat16, lr=1e-3, timeout_s=600,
    )  # fmt: skip
    mesh = start(rank, settings, rendezvous)
    try:
        trainers = []
        fp8: dict[str, Any] = {**common, "fp8": {"recipe": flags.recipe, "filter": blocks_only}}
        for options in (common, fp8):
            model = build(settings, mesh)
            trainers.append(Trainer(model, torch.compile(model, backend="ub_overlap", options=options), settings))
        batches = TextBatches(load_corpus(), batch=settings.batch, seq=settings.seq, seed=settings.seed)
        with show_progress("fp8", quiet=rank != 0) as progress:
            progress("compiling")
            for step in range(settings.steps):
                for group in (g for trainer in trainers for g in trainer.optimizer.param_groups):
                    group["lr"] = settings.lr * rate(step, settings.steps)
                tokens, targets = (t.to(settings.device) for t in batches.next())
                # After two steps all is compiled: anything else is an error.
                with torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"):
                    losses = [trainer.step(tokens, targets) for trainer in trainers]
                progress(f"step {step + 1} of {settings.steps}; loss: bf16 {losses[0]:.4f}, fp8 {losses[1]:.4f}")
        if rank == 0:
            casts = sum(bool(c.recipe) for plan in reports().plans for c in plan.casts)
            results.put(([t.run.losses for t in trainers], casts, reports().metrics("")))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def difference(bf16: list[float], fp8: list[float]) -> float:
    """Return the relative difference of the mean losses over the last tenth of the steps; NaN if a loss is NaN."""
    last = max(1, len(bf16) // 10)
    a, b = (sum(x[-last:]) / last for x in (bf16, fp8))
    return (b - a) / a


def draw(path: Path, bf16: list[float], fp8: list[float], recipe: str) -> None:
    """Draw the curves and their relative difference, smoothed over ten steps."""
    import matplotlib  # pyrefly: ignore[missing-import]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyrefly: ignore[missing-import]

    def smooth(values: list[float]) -> list[float]:
        return [sum(values[max(0, i - 9) : i + 1]) / len(values[max(0, i - 9) : i + 1]) for i in range(len(values))]

    figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(7, 5), height_ratios=(3, 1))
    top.plot(smooth(bf16), label="bf16", linewidth=1.2)
    top.plot(smooth(fp8), label=f'fp8="all", {recipe}', linewidth=1.2, linestyle="--")
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    bottom.plot([100 * (b - a) / a for a, b in zip(smooth(bf16), smooth(fp8), strict=True)], linewidth=1)
    bottom.axhline(0, color="black", linewidth=0.5)
    bottom.set_ylabel("fp8 - bf16 (%)")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run_rank, (flags, f"{folder}/rendezvous", results), nprocs=flags.ranks)
        (bf16, fp8), casts, found = results.get()
    print(plot(bf16, fp8, marks="bf*"))
    if flags.data:
        flags.data.write_text(json.dumps({"recipe": flags.recipe, "bf16": bf16, "fp8": fp8}) + "\n")
    if flags.figure:
        draw(flags.figure, bf16, fp8, flags.recipe)
    worst = difference(bf16, fp8)
    print(f"{found['overlapped']:.0f} of {found['collectives']:.0f} collectives overlapped, bf16 and float8")
    good = math.isfinite(worst) and abs(worst) <= BOUND and casts > 0
    print(
        f"{casts} products in float8; mean loss of the last tenth: {100 * worst:+.2f}% against bf16, allowed {100 * BOUND:g}%"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
