"""One run: groups, two alternating variants, the table of step times, the comparison of losses and weights."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from layer.flags import Flags, parse
from layer.train import PHASES, LayerVariant, RandomBatches, Record, connect, synchronize_ranks, unequal_replicas
from ub_overlap.compiler.text.table import render_table

BOUND = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
FP8_BOUND = 3e-2
"""Both variants quantize alike, but a sum that differs in its last bit may round to another float8 value."""


def log(flags: Flags, text: str, *, everyone: bool = False) -> None:
    """Print a line of this rank; of rank 0 only unless `everyone` or --verbose."""
    if flags.rank == 0 or everyone or flags.verbose:
        sys.stdout.write(f"[rank {flags.rank}] {text}\n")
        sys.stdout.flush()


def disagreement(a: Record, b: Record) -> float:
    """Return the largest relative difference of the losses of two records; infinite if a loss is not finite."""
    if not all(map(math.isfinite, [*a.losses, *b.losses])):
        return math.inf
    return max(abs(x - y) / max(abs(x), abs(y), 1e-30) for x, y in zip(a.losses, b.losses, strict=True))


def verdict(a: Record, b: Record, dtype: torch.dtype, fp8: bool = False) -> tuple[str, int]:
    """Return the comparison of two variants' losses as text, and the exit code."""
    worst, bound = disagreement(a, b), max(BOUND[dtype], FP8_BOUND if fp8 else 0.0)
    agree = worst <= bound
    text = f"the losses {'agree' if agree else 'DO NOT AGREE'}: largest relative difference {worst:.1e}, allowed {bound:.0e}"
    return text, 0 if agree else 1


def step_log(record: Record, iteration: int) -> str:
    phases = ", ".join(f"{name} {ms:.1f} ms" for name, ms in zip(PHASES, record.phases[-1], strict=True))
    return f"iteration {iteration} {record.name}: {phases}; step {record.times[-1]:.1f} ms; loss {record.losses[-1]:.6f}"


def slowest(record: Record, flags: Flags) -> float:
    """Return the median step time of the slowest rank, in ms. All ranks together."""
    worst = torch.tensor(record.median(flags.warmup), device=flags.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def train(flags: Flags) -> int:
    """Run one rank and return the exit code."""
    mesh = connect(flags)
    groups = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in ("tp", "dp")}
    log(flags, f"TP group {groups['tp']}, DP group {groups['dp']}", everyone=True)
    synchronize_ranks(flags)
    kinds = [("no overlap", "off")] if flags.compare or not flags.comm_overlap else []
    kinds += [("overlap", flags.overlap)] if flags.comm_overlap else []
    variants = [LayerVariant(name, overlap, flags, mesh) for name, overlap in kinds]
    batches = RandomBatches(flags, mesh, variants[0].masks)
    fp8 = f" with linears in float8 ({flags.options['fp8']['recipe']})" if flags.fp8 else ""
    log(
        flags,
        f"{flags.num_layers} x {flags.layer}: hidden {flags.hidden}, S {flags.seq_length}, B {flags.batch_size}, "
        f"{flags.dtype}{fp8}, {flags.num_replicas} replicas of {flags.tensor_parallel} ranks on {flags.device}",
    )
    for iteration in range(flags.num_iters):
        step = [batches.next() for _ in range(flags.accumulate)]
        for variant in variants:
            # After two steps all is compiled: anything else is an error.
            with torch.compiler.set_stance("fail_on_recompile" if iteration > 1 else "default"):
                variant.step(step)
            log(flags, step_log(variant.record, iteration))
    records = [variant.record for variant in variants]
    times = [slowest(record, flags) for record in records]
    rows = [
        {"variant": r.name, "median step ms": f"{ms:.2f}", "speed": f"{times[0] / ms:.3f}x",
         "sites overlapped": f"{r.overlapped} of {r.sites}", "graphs": len(r.plans), "last loss": f"{r.losses[-1]:.6f}"}
        for r, ms in zip(records, times, strict=True)
    ]  # fmt: skip
    log(flags, "step times\n" + render_table(rows))
    unequal = {name for variant in variants for name in unequal_replicas(variant.model, mesh.get_group("dp"))}
    if unequal:
        log(flags, f"the replicas of this rank DO NOT AGREE in {', '.join(sorted(unequal))}", everyone=True)
        return 1
    if len(records) == 1:
        return 0
    text, code = verdict(records[0], records[1], flags.dtype, flags.fp8)
    log(flags, text)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse(argv)
    if flags.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // flags.local_world))
    try:
        return train(flags)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
