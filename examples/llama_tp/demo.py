"""Train a small Llama twice on local ranks, eager and through ub_overlap, side by side, and compare.

    python examples/llama_tp/demo.py [--ranks 2] [--steps 24] [--overlap force] [--inner inductor] ...

It starts its own ranks: on GPUs with NCCL if there is one per rank, otherwise on the CPU with gloo. It prints both loss curves,
the largest difference, step times, the table of sites, and the paths of the reports. Exit code 0: the curves agree; 1: they
differ, or a rank failed; 2: bad arguments.
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

from console import plot
from data import text_files
from model import ModelArgs
from parallelize import check_divides
from train import DemoOutcome, TrainingRun, TrainingSettings, train

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
TOLERANCE_REASON = (
    "sums in another order differ in the last bits, and training amplifies that in each step. This bounds rounding; "
    "a wrong gradient changes the loss far more within a few steps"
)


def parse(argv: Sequence[str] | None) -> TrainingSettings:
    """Return the settings of a run. SystemExit(2) with a message for bad arguments."""
    parser = argparse.ArgumentParser(description="Train a small Llama eager and through ub_overlap, side by side.")
    parser.add_argument("--ranks", type=int, default=2, help="processes, each with its shard of a layer (default %(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="training steps (default %(default)s)")
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


def loss_table(eager: TrainingRun, ours: TrainingRun, *, rows: int = 8) -> str:
    """Return `rows` evenly spaced steps, first and last included."""
    count = len(eager.losses)
    steps = sorted({round(i * (count - 1) / max(rows - 1, 1)) for i in range(rows)})
    lines = [f"  {'step':>5}  {'eager':>10}  {'ub_overlap':>10}  {'difference':>10}"]
    for i in steps:
        e, u = eager.losses[i], ours.losses[i]
        lines.append(f"  {i + 1:>5}  {e:>10.5f}  {u:>10.5f}  {u - e:>10.1e}")
    return "\n".join(lines)


def time_line(name: str, run: TrainingRun) -> str:
    """Return the time of the first step (with compilation) and the median of the others."""
    later = run.seconds[1:] or run.seconds
    return f"  {name:<10}  first {run.seconds[0]:7.2f} s   median of the others {1e3 * statistics.median(later):8.1f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    settings = parse(argv)
    where = f"{settings.ranks} GPUs (NCCL)" if settings.device == "cuda" else f"{settings.ranks} CPU ranks (gloo)"
    args = settings.args
    print(
        f"Llama: dim {args.dim}, {args.num_layers} layers, {args.num_heads} heads ({args.num_kv_heads} kv), on {where}; "
        f"batch {settings.batch} x {settings.seq} bytes of {len(text_files())} text files; options {settings.options}"
    )
    print("Each step: eager, then ub_overlap, on the same batch. The first one compiles.", flush=True)
    try:
        outcome = launch(settings)
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    eager, ours = outcome.eager, outcome.ours
    worst = max(abs(e - u) for e, u in zip(eager.losses, ours.losses, strict=True))
    finite = all(map(math.isfinite, [*eager.losses, *ours.losses]))
    tolerance = TOLERANCE[settings.dtype]
    agree = finite and worst <= tolerance

    print("\nLoss, nats per byte")
    print(loss_table(eager, ours))
    if finite:
        print("\n  e eager, u ub_overlap, * both")
        print(plot(eager.losses, ours.losses))
    print("\nSites and decisions")
    print(outcome.sites)
    print("\nStep time")
    print(time_line("eager", eager))
    print(time_line("ub_overlap", ours))
    print("\nReports; show one with: python -m ub_overlap report show DIGEST")
    print("\n".join(f"  {path}" for path in outcome.paths))
    if outcome.page:
        print(f"\nGraphs before and after, with all decisions: open {outcome.page}")
    print(f"\nLargest difference {worst:.1e}, allowed {tolerance:.0e}: {TOLERANCE_REASON}.")
    print(f"The loss curves {'agree' if agree else 'DO NOT AGREE'}.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
