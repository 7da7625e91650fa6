"""One rank of the demo (demo.py starts them): train a model in three variants, step by step on the same batches."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from console import WIDTH, WrappedLines, wrap
from data import TextBatches, load_corpus
from model import ModelArgs, Transformer
from parallelize import parallelize
from ub_overlap import reports
from ub_overlap.cli.progress import show_progress
from ub_overlap.compiler.text.table import render_table

COLUMNS = ("site", "kind", "module", "strategy", "hidden bytes / reason")
"""Of the report's table, what fits WIDTH without wrapped cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """Settings from the command line, the same on every rank."""

    ranks: int
    """Processes, each on its own GPU or all on the CPU."""
    device: str
    """"cuda" or "cpu"."""
    steps: int
    batch: int
    seq: int
    args: ModelArgs
    options: dict[str, Any]
    """Options of torch.compile(backend="ub_overlap", options=...)."""
    page: str | None = ""
    """File for the HTML report of rank 0; "" for none, None for a file in a new private folder."""
    dtype: torch.dtype
    """Dtype of weights and activations; losses are computed in fp32."""
    lr: float = 3e-3
    seed: int = 0
    timeout_s: int = 120


@dataclass(kw_only=True, slots=True)
class TrainingRun:
    """Loss and wall time in seconds of each step of one training, including the first."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class DemoOutcome:
    """The results of rank 0: its trainings, and the report of the model with overlap, as text of at most WIDTH columns."""

    eager: TrainingRun
    plain: TrainingRun
    """Compiled with overlap="off"."""
    ours: TrainingRun
    sites: str
    overlapped: int
    """Collectives that were overlapped, of `collectives`."""
    collectives: int
    digests: list[str]
    """Of the stored reports."""
    page: str = ""
    """Path of the HTML report."""


def build(settings: TrainingSettings, mesh: DeviceMesh) -> Transformer:
    """Return the model with weights from the seed, distributed over `mesh`."""
    model = Transformer(settings.args)
    model.init_weights(settings.seed)
    rope = model.rope.to(settings.device)
    model.to(settings.device, settings.dtype)
    model.rope = rope  # angles stay in fp32: bf16 has too few digits for positions above 256
    return parallelize(model, mesh)


class Trainer:
    """A model, its AdamW and its record. `forward` is the model or the compiled model."""

    def __init__(self, model: Transformer, forward: nn.Module | Callable[[Tensor], Tensor], settings: TrainingSettings) -> None:
        self.forward, self.device, self.run = forward, settings.device, TrainingRun()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), foreach=False)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Run one training step. Return the loss before it, in nats per byte."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        logits = self.forward(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = loss.item()
        self.run.seconds.append(time.perf_counter() - begin)
        self.run.losses.append(value)
        return value


def start(rank: int, settings: TrainingSettings, rendezvous: str) -> DeviceMesh:
    """Join the process group through the file `rendezvous`. Return the mesh over all ranks."""
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
    dist.init_process_group(
        "nccl" if settings.device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=settings.timeout_s),
    )
    return init_device_mesh(settings.device, (settings.ranks,))


def train(rank: int, settings: TrainingSettings, rendezvous: str, deliver: Callable[[DemoOutcome], None]) -> None:
    """Run one rank. Rank 0 shows progress and passes the outcome to `deliver`."""
    mesh = start(rank, settings, rendezvous)
    if logging.lastResort:
        logging.lastResort.setFormatter(WrappedLines())
    try:
        eager_model, ours_model, plain_model = (build(settings, mesh) for _ in range(3))
        off = {**settings.options, "overlap": "off"}
        trainers = {
            "eager": Trainer(eager_model, eager_model, settings),
            "with overlap": Trainer(
                ours_model, torch.compile(ours_model, backend="ub_overlap", options=settings.options), settings
            ),
            "without overlap": Trainer(plain_model, torch.compile(plain_model, backend="ub_overlap", options=off), settings),
        }
        eager, ours, plain = trainers.values()
        report = reports()
        batches = TextBatches(load_corpus(), batch=settings.batch, seq=settings.seq, seed=settings.seed)
        with show_progress("demo", quiet=rank != 0) as progress:
            for step in range(settings.steps):
                tokens, targets = (t.to(settings.device) for t in batches.next())
                # The first step compiles all; later, a compilation is an error.
                with torch.compiler.set_stance("fail_on_recompile" if step > 0 else "default"):
                    for name, trainer in trainers.items():
                        if step == 0:
                            progress(f"first step, {name}" + (" (compiles)" if trainer is not eager else ""))
                        trainer.step(tokens, targets)
                        if step == 0 and trainer is ours:
                            report = reports()  # only of the graphs with overlap: the others are not yet compiled
                losses = ", ".join(f"{name} {trainer.run.losses[-1]:.4f}" for name, trainer in trainers.items())
                progress(f"step {step + 1} of {settings.steps}; loss: {losses}")
        if rank == 0:
            rows = [{name: row[name] for name in COLUMNS} for row in report.rows()]
            deliver(DemoOutcome(
                eager=eager.run, plain=plain.run, ours=ours.run,
                sites="\n".join([wrap(report.summary()), render_table(rows, width=WIDTH), wrap(report.totals())]),
                overlapped=sum(d.overlapped for d in report.decisions), collectives=len(report.decisions),
                digests=[path.stem for path in report.paths],
                page=str(report.to_html(settings.page, "demo")) if settings.page else "",
            ))  # fmt: skip
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit("train.py is one rank of the demo, which demo.py starts: python examples/llama_tp/demo.py")
