"""One rank's training steps, with their phases, for one variant of a layer or for two in turn."""

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
    """Join torchrun's ranks; the 2D mesh ("dp", "tp"): replica d holds the ranks [d T, ..., d T + T - 1]."""
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
    """Give a group that init_device_mesh made, with the default of its backend, our own deadline."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
    else:  # before torch 2.13
        group._get_backend(torch.device(device))._set_default_timeout(timeout)


def meet(flags: Flags) -> None:
    """All ranks wait for each other, with nothing left to do on their devices."""
    if flags.device == "cuda":
        torch.cuda.synchronize()
        dist.barrier(device_ids=[flags.local_rank])
    else:
        dist.barrier()


def unequal_replicas(model: LocalParameters, group: dist.ProcessGroup) -> list[str]:
    """The parameters that are not bitwise the same on all ranks of `group`: there should be none. All ranks together."""
    unequal = []
    for name, parameter in model.named_parameters():
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        if not torch.equal(low, high):
            unequal.append(name)
    return unequal


class Phases:
    """Times the phases of a step in milliseconds, without waiting for the device in between: end() does, once."""

    def __init__(self, device: str) -> None:
        self.cuda, self.marks = device == "cuda", []

    def mark(self) -> None:
        """A phase begins, or the last one is over."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def end(self) -> list[float]:
        """The times between the marks."""
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
    """Random inputs, new ones every time, the same in every run. The layers learn tanh(x)."""

    def __init__(self, flags: Flags, mesh: DeviceMesh, masks: int) -> None:
        self.flags, self.count = flags, masks if flags.dropout > 0 else 0
        self.masks = Masks(mesh["tp"], seed=flags.seed, replica=mesh.get_local_rank("dp"))
        self.masks.check()
        self.generator = torch.Generator(flags.device).manual_seed(flags.seed * 100_003 + flags.rank)

    def next(self) -> Batch:
        f = self.flags
        shape = (f.seq_length // f.tensor_parallel, f.batch_size, f.hidden)
        x = torch.randn(shape, generator=self.generator, device=f.device, dtype=f.dtype)
        whole = (f.seq_length, f.batch_size, f.hidden)
        keep = [self.masks.draw(whole, Shard(0), f.dropout) for _ in range(self.count)]
        return Batch(x=x.requires_grad_(), target=torch.tanh(x.detach()), keep=keep)


@dataclass(kw_only=True, slots=True)
class Record:
    """What a variant did: every step's loss (the mean over all ranks), time in ms and times of its phases; and its sites."""

    name: str
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    phases: list[list[float]] = field(default_factory=list)
    sites: int = 0
    overlapped: int = 0
    plans: list[str] = field(default_factory=list)

    def median(self, warmup: int) -> float:
        """Median step time in ms, less the first `warmup` steps (the last one is always counted)."""
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
        """One step over `batches`, gradients summed; all ranks together. Its times are those of this rank."""
        flags, first = self.flags, not self.record.losses
        known = {plan.digest for plan in reports().plans} if first else set()
        meet(flags)
        begin = time.perf_counter()
        total = torch.zeros((), device=flags.device)
        spent = [0.0] * len(PHASES)
        passes = []
        for i, batch in enumerate(batches):
            phases = Phases(flags.device)
            passes.append(phases)
            with self._gradients_stay_here(last=i == len(batches) - 1):
                phases.mark()
                y = self.forward(batch.x, *batch.keep)
                phases.mark()
                # The mean over a rank's share; with DDP's mean over replicas, the sum over T ranks is the mean over everything.
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
            # The last pass has one stretch more, from its end to the optimizer's begin: it is next to nothing.
            for phase, ms in enumerate([*times[:2], times[-1]] if len(times) == 4 else times):
                spent[phase] += ms
        self.record.times.append(1e3 * (time.perf_counter() - begin))
        self.record.phases.append(spent)
        dist.all_reduce(total)
        self.record.losses.append(total.item() / flags.world)
        if first:
            self._count(known)

    @contextlib.contextmanager
    def _gradients_stay_here(self, last: bool) -> Iterator[None]:
        """Around all passes but the last of a step: DDP only adds gradients up and averages them in the last one."""
        with contextlib.nullcontext() if last or self.ddp is None else self.ddp.no_sync():
            yield

    def _count(self, known: set[str]) -> None:
        """The sites of the graphs that this variant's first step compiled, or took from a warm cache.

        Where no plan is new both variants decided alike (nothing to gain), so their plans are one and the same."""
        every = reports().decisions
        mine = [d for d in every if d.plan not in known] or every
        self.record.sites = len(mine)
        self.record.overlapped = sum(d.overlapped and d.executed not in (None, "c10d") for d in mine)
        self.record.plans = list(dict.fromkeys(d.plan for d in mine))
