"""Training steps of one rank with their phases, for one variant of a layer or for two alternating ones."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from layer.flags import Flags
from layer.model import Stack, parallelize
from layer.replicas import LocalParameters, build
from layer.rng import Masks
from ub_overlap import reports

PHASES = ("forward", "backward", "optimizer")


def connect(flags: Flags) -> DeviceMesh:
    """Join torchrun's ranks. Return the 2D mesh ("dp", "tp"): replica d has the ranks [d T, ..., d T + T - 1]."""
    timeout = timedelta(seconds=flags.timeout_s)
    if flags.device == "cuda":
        torch.cuda.set_device(flags.local_rank)
    dist.init_process_group("nccl" if flags.device == "cuda" else "gloo", timeout=timeout)
    shape = (flags.num_replicas, flags.tensor_parallel)
    mesh = init_device_mesh(flags.device, shape, mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        limit_wait(mesh.get_group(name), flags.device, timeout)
    return mesh


def limit_wait(group: Any, device: str, timeout: timedelta) -> None:
    """Set the deadline of a group that init_device_mesh created with its backend's default."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
    else:  # before torch 2.13
        group._get_backend(torch.device(device))._set_default_timeout(timeout)


def synchronize_ranks(flags: Flags) -> None:
    """Wait for all ranks and their devices."""
    if flags.device == "cuda":
        torch.cuda.synchronize()
        dist.barrier(device_ids=[flags.local_rank])
    else:
        dist.barrier()


def unequal_replicas(model: LocalParameters, group: dist.ProcessGroup) -> list[str]:
    """Return the parameters that are not bitwise equal on all ranks of `group`. All ranks together."""
    unequal = []
    for name, parameter in model.named_parameters():
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        if not torch.equal(low, high):
            unequal.append(name)
    return unequal


class Phases:
    """Times the phases of a step in milliseconds. Only end() waits for the device."""

    def __init__(self, device: str) -> None:
        self.cuda, self.marks = device == "cuda", []

    def mark(self) -> None:
        """Mark the begin of a phase, or the end of the last one."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def end(self) -> list[float]:
        """Return the times between the marks."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in pairs]
        return [1e3 * (b - a) for a, b in pairs]


@dataclass(kw_only=True, slots=True)
class Batch:
    """The input of one forward and backward pass on this rank: x and target [S/T, B, H], and the dropout masks."""

    x: Tensor
    target: Tensor
    keep: list[Tensor]


class RandomBatches:
    """Random inputs, different in every step, the same in every run. The layers learn tanh(x)."""

    def __init__(self, flags: Flags, mesh: DeviceMesh, masks: int) -> None:
        self.flags, self.count = flags, masks if flags.dropout > 0 else 0
        self.masks = Masks(mesh["tp"], seed=flags.seed, replica=mesh.get_local_rank("dp"))
        self.masks.check()
        self.generator = torch.Generator(flags.device).manual_seed(flags.seed * 100_003 + flags.rank)

    def next(self) -> Batch:
        f = self.flags
        shape = (f.seq_length // f.tensor_parallel, f.batch_size, f.hidden)
        x = torch.randn(shape, generator=self.generator, device=f.device, dtype=f.dtype)
        full_shape = (f.seq_length, f.batch_size, f.hidden)
        keep = [self.masks.draw(full_shape, Shard(0), f.dropout) for _ in range(self.count)]
        return Batch(x=x.requires_grad_(), target=torch.tanh(x.detach()), keep=keep)


@dataclass(kw_only=True, slots=True)
class Record:
    """The record of a variant: loss of every step (mean over all ranks), time in ms, times of its phases; and its sites."""

    name: str
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    phases: list[list[float]] = field(default_factory=list)
    sites: int = 0
    overlapped: int = 0
    plans: list[str] = field(default_factory=list)

    def median(self, warmup: int) -> float:
        """Return the median step time in ms without the first `warmup` steps (the last step always counts)."""
        return statistics.median(self.times[min(warmup, len(self.times) - 1) :])


class LayerVariant:
    """A layer stack, compiled with the given overlap, and its AdamW. Equal flags give equal weights."""

    def __init__(self, name: str, overlap: str, flags: Flags, mesh: DeviceMesh) -> None:
        self.flags, self.record = flags, Record(name=name)
        stack = Stack(
            flags.layer, flags.num_layers, hidden=flags.hidden, head_dim=flags.head_dim, mlp=flags.mlp_ratio * flags.hidden,
            dropout=flags.dropout,
        )  # fmt: skip
        stack.init_weights(flags.seed)
        self.masks = stack.masks
        self.model = model = LocalParameters(parallelize(stack.to(flags.device, flags.dtype), mesh["tp"]))
        self.forward: Callable[..., Tensor]
        self.ddp: DistributedDataParallel | None
        options: dict[str, Any] = {**flags.options, "overlap": overlap}
        if flags.fp8:
            options["fp8"] = {**options["fp8"], "state": name}  # both variants have the same module paths
        self.forward, self.ddp = build(
            model, mesh, options=options, order=flags.ddp, graphs=flags.ddp_graphs, bucket_mb=flags.bucket_mb
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)

    def step(self, batches: list[Batch]) -> None:
        """Run one step over `batches` with summed gradients; all ranks together. Times are those of this rank."""
        flags, first = self.flags, not self.record.losses
        known = {plan.digest for plan in reports().plans} if first else set()
        synchronize_ranks(flags)
        begin = time.perf_counter()
        total = torch.zeros((), device=flags.device)
        spent = [0.0] * len(PHASES)
        passes = []
        for i, batch in enumerate(batches):
            phases = Phases(flags.device)
            passes.append(phases)
            with self._local_gradients(last=i == len(batches) - 1):
                phases.mark()
                y = self.forward(batch.x, *batch.keep)
                phases.mark()
                # The mean over a shard. With DDP's mean over replicas, the sum over T ranks is the mean over all elements.
                loss = (y.float() - batch.target.float()).square().mean() / len(batches)
                (loss / flags.tensor_parallel).backward()
                phases.mark()
            total += loss.detach()
            batch.x.grad = None
        passes[-1].mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        passes[-1].mark()
        for phases in passes:
            times = phases.end()
            # The last pass has one interval more, from its end to the optimizer's begin, which is negligible.
            for phase, ms in enumerate([*times[:2], times[-1]] if len(times) == 4 else times):
                spent[phase] += ms
        self.record.times.append(1e3 * (time.perf_counter() - begin))
        self.record.phases.append(spent)
        dist.all_reduce(total)
        self.record.losses.append(total.item() / flags.world)
        if first:
            self._count(known)

    @contextlib.contextmanager
    def _local_gradients(self, last: bool) -> Iterator[None]:
        """Disable DDP's averaging in all passes but the last of a step. Gradients accumulate locally."""
        with contextlib.nullcontext() if last or self.ddp is None else self.ddp.no_sync():
            yield

    def _count(self, known: set[str]) -> None:
        """Count the sites of the graphs that this variant's first step compiled or read from a warm cache.

        If no plan is new, both variants decided alike (no gain) and share their plans."""
        every = reports().decisions
        mine = [d for d in every if d.plan not in known] or every
        self.record.sites = len(mine)
        self.record.overlapped = sum(d.overlapped and d.executed not in (None, "c10d") for d in mine)
        self.record.plans = list(dict.fromkeys(d.plan for d in mine))
