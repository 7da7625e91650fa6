"""Train a small Llama on local ranks: eager, compiled without overlap, and with overlap, side by side, and compare.

    python examples/llama_tp/demo.py [--ranks 2] [--steps 12] [--overlap force] [--inner inductor] ...

It starts its own ranks: on GPUs with NCCL if there is one per rank, otherwise on the CPU with gloo. It prints the loss curves
and the table of sites. It ends with a verdict, the step times of all three, and commands to try next. Exit code 0: the losses
agree; 1: they differ, or a rank failed; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.multiprocessing as mp

from console import plot, wrap
from data import text_files
from model import ModelArgs
from parallelize import check_divides
from train import DemoOutcome, TrainingRun, TrainingSettings, train
from ub_overlap.compiler.text.table import render_table

NO_OVERLAP = 'overlap="off"'
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Largest difference of losses. Sums in another order differ in the last bits, and training amplifies that in each step. This
bounds rounding; a wrong gradient changes the loss far more within a few steps."""


def parse(argv: Sequence[str] | None) -> TrainingSettings:
    """Return the settings of a run. SystemExit(2) with a message for bad arguments."""
    parser = argparse.ArgumentParser(description="Train a small Llama eager, compiled without overlap, and with overlap.")
    parser.add_argument("--ranks", type=int, default=2, help="processes, each with its shard of a layer (default %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="training steps (default %(default)s)")
    parser.add_argument("--dim", type=int, default=256, help="model dimension, a multiple of 64 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks (default %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step (default %(default)s)")
    parser.add_argument("--seq", type=int, default=256, help="bytes of text per sequence (default %(default)s)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs if there is one per rank"
    )
    parser.add_argument(
        "--inner", choices=("inductor", "aot_eager"), default="inductor", help="compiler of the rewritten graph"
    )
    parser.add_argument(
        "--overlap", choices=("auto", "force", "off"), default="force", help="which sites (default %(default)s)"
    )
    parser.add_argument(
        "--page", default=None, metavar="FILE", help="write the report as a page (default: a new private folder under $TMPDIR)"
    )
    parser.add_argument(
        "--timeout", type=int, default=120, metavar="S", help="seconds a rank waits for another before it fails"
    )
    flags = parser.parse_args(argv)
    for name in ("ranks", "steps", "dim", "layers", "batch", "seq", "timeout"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name} {getattr(flags, name)}: expected at least 1")
    if flags.dim % 64:
        parser.error(f"--dim {flags.dim}: expected a multiple of 64 (8 query heads of an even number of channels)")
    if flags.device == "cuda" and torch.cuda.device_count() < flags.ranks:
        parser.error(f"--device cuda: {flags.ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}")
    args = ModelArgs(dim=flags.dim, num_layers=flags.layers, hidden_dim=3 * flags.dim, max_seq_len=flags.seq)
    try:
        check_divides(args, flags.ranks)
    except ValueError as error:
        parser.error(f"--ranks {flags.ranks}: {error}")
    device = flags.device
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= max(flags.ranks, 2) else "cpu"
    return TrainingSettings(
        ranks=flags.ranks, device=device, steps=flags.steps, batch=flags.batch, seq=flags.seq, args=args,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        options={"overlap": flags.overlap, "inner": flags.inner}, timeout_s=flags.timeout,
        page=flags.page,
    )  # fmt: skip


def _rank(rank: int, settings: TrainingSettings, folder: str) -> None:
    """Run a spawned rank. Rank 0 stores the outcome in `folder`."""
    train(rank, settings, f"{folder}/rendezvous", lambda outcome: torch.save(outcome, f"{folder}/outcome"))


def launch(settings: TrainingSettings) -> DemoOutcome:
    """Run all ranks to their end.

    Raises:
        ProcessRaisedException, ProcessExitedException: a rank failed or died (message); the others are stopped.
    """
    # One compiler thread per rank. The default, a pool of processes for each rank, doubles the compile time on few cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if settings.page is None:  # a name that others cannot foresee, in a folder of mode 0700
        settings = replace(settings, page=str(Path(tempfile.mkdtemp(prefix="ub_overlap_demo_page_"), "report.html")))
    with tempfile.TemporaryDirectory(prefix="ub_overlap_demo_") as folder:
        mp.spawn(_rank, (settings, folder), nprocs=settings.ranks)
        return torch.load(Path(folder, "outcome"), weights_only=False)


def loss_table(outcome: DemoOutcome, *, rows: int = 8) -> str:
    """Return `rows` evenly spaced steps, first and last included."""
    count = len(outcome.eager.losses)
    steps = sorted({round(i * (count - 1) / max(rows - 1, 1)) for i in range(rows)})
    return render_table(
        [
            {"step": i + 1, "eager": e, NO_OVERLAP: p, "overlapped": u, "overlapped - eager": f"{u - e:.1e}"}
            for i in steps
            for e, p, u in [[run.losses[i] for run in (outcome.eager, outcome.plain, outcome.ours)]]
        ],
        floats=".5f",
    )


def median_ms(run: TrainingRun) -> float:
    """Return the median time of a step in milliseconds, without the first, which compiles."""
    return 1e3 * statistics.median(run.seconds[1:] or run.seconds)


def time_table(outcome: DemoOutcome) -> str:
    """Return the times of a step of each variant."""
    runs = {"eager": outcome.eager, NO_OVERLAP: outcome.plain, "overlapped": outcome.ours}
    return render_table(
        [
            {"step time": "first (compiles), s", **{name: run.seconds[0] for name, run in runs.items()}},
            {"step time": "median of the others, ms", **{name: median_ms(run) for name, run in runs.items()}},
        ],
        floats=".1f",
    )


def time_verdict(outcome: DemoOutcome, device: str) -> str:
    """Return what the step times say."""
    if device == "cpu":
        return "CPU executor: correctness only. These times show no gain and no loss; gains need GPUs."
    eager, plain, ours = (median_ms(run) for run in (outcome.eager, outcome.plain, outcome.ours))
    compared = f"{plain / ours:.2f} times as fast as without overlap, {eager / ours:.2f} times as fast as eager."
    return f"A step with overlap is {compared}"


def next_commands(outcome: DemoOutcome, settings: TrainingSettings) -> dict[str, str]:
    """Return what to try next: purpose -> command line."""
    here = {name: os.path.relpath(name) for name in (sys.executable, __file__)}
    python, demo = (name if short.startswith("..") else short for name, short in here.items())
    commands = {}
    if outcome.digests:
        commands["Each collective of the first graph, and why"] = f"{python} -m ub_overlap explain {outcome.digests[0]}"
    if settings.device == "cuda":
        commands["A larger model, whose matmuls hide more"] = f"{python} {demo} --dim 4096 --seq 2048"
    else:
        commands["Only what is predicted to gain"] = f"{python} {demo} --overlap auto"
    commands["Predict a model on GPUs, without having them"] = f"{python} -m ub_overlap plan --model llama-8b --tp 4"
    return commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    settings = parse(argv)
    where = f"{settings.ranks} GPUs (NCCL)" if settings.device == "cuda" else f"{settings.ranks} CPU ranks (gloo)"
    args = settings.args
    print(wrap(
        f"Llama: dim {args.dim}, {args.num_layers} layers, {args.num_heads} heads ({args.num_kv_heads} kv), on {where}; "
        f"batch {settings.batch} x {settings.seq} bytes of {len(text_files())} text files; options {settings.options}\n"
        f"Each step: eager, overlapped, and compiled with {NO_OVERLAP}, on the same batch. The first one compiles."
    ), flush=True)  # fmt: skip
    try:
        outcome = launch(settings)
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    eager, ours = outcome.eager.losses, outcome.ours.losses
    worst = max(abs(e - u) for e, p, u in zip(eager, outcome.plain.losses, ours, strict=True) for u in (p, u))
    finite = all(map(math.isfinite, [*eager, *outcome.plain.losses, *ours]))
    tolerance = TOLERANCE[settings.dtype]
    agree = finite and worst <= tolerance

    print("\nLoss, nats per byte")
    print(loss_table(outcome))
    if finite:
        print("\n  e eager, u overlapped, * both")
        print(plot(eager, ours))
    print("\nSites and decisions")
    print(outcome.sites)
    if outcome.page:
        print(f"\nGraphs before and after, with all decisions, as a page:\n  {outcome.page}")
    print(
        f"\nThe losses {'agree' if agree else 'DO NOT AGREE'} (largest difference {worst:.1e}, allowed {tolerance:.0e}); "
        f"{outcome.overlapped} of {outcome.collectives} collectives overlapped."
    )
    print(time_verdict(outcome, settings.device))
    print(f"\n{time_table(outcome)}\n\nTry next")
    for purpose, command in next_commands(outcome, settings).items():
        print(f"  {purpose}:\n    {command}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
