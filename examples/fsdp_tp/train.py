"""Train a small Llama with data parallelism (ZeRO-3) x tensor parallelism, and print which collectives are overlapped.

    torchrun --nproc-per-node 4 examples/fsdp_tp/train.py --tp 2 --check
    torchrun --nproc-per-node 8 examples/fsdp_tp/train.py --tp 2 --replicate 2 --scatter-first --check

    --form graph     parameters gathered in the graph (in_graph_shards.py), the whole model compiled
    --form fsdp2     fully_shard over ub_overlap.fsdp.install, each block compiled

    --replicate N    N copies of the shards (HSDP), as one per host

On GPUs with NCCL if there is one per rank, otherwise on the CPU with gloo. Ranks that are not tensor parallel share the
batches. With --check each rank also trains the plain model on all batches. Exit code 0: the losses agree, or nothing
was compared; 1: they differ; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ub_overlap

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llama_tp"))
from data import TextBatches, load_corpus
from in_graph_shards import shard_parameters
from model import ModelArgs, Transformer
from parallelize import check_divides, parallelize

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""The largest difference of losses: sums in another order, which training amplifies."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the settings of a run. SystemExit(2) with a message for bad arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; the others are data parallel (%(default)s)")
    parser.add_argument("--replicate", type=int, default=1, help="copies of the sharded model, HSDP (default %(default)s)")
    parser.add_argument("--scatter-first", action="store_true", help="with --form graph: option scatter_first of the backend")
    parser.add_argument("--form", choices=("graph", "fsdp2"), default="graph", help="form of ZeRO-3 (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (default %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per step (default %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per batch and replica (default %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="bytes of text per sequence (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks (default %(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="model dimension (default %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient (default %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs, if there are enough")
    parser.add_argument("--inner", choices=("inductor", "aot_eager"), default="inductor", help="compiler of the graphs")
    parser.add_argument(
        "--overlap", choices=("auto", "force", "split", "off"),
        help="auto: what is predicted to pay (default on GPUs); force: sites next to matmuls; split: all (default on CPUs)",
    )  # fmt: skip
    parser.add_argument("--checkpoint", metavar="FOLDER", help="go on from this checkpoint, if it exists, and write it")
    parser.add_argument("--check", action="store_true", help="compare the losses with training on one process")
    flags = parser.parse_args(argv)
    flags.ranks, flags.local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    flags.dp = flags.ranks // max(flags.tp, 1)
    if flags.tp < 1 or flags.ranks % flags.tp or flags.dp < 2:
        parser.error(f"--tp {flags.tp}: {flags.ranks} ranks must be 2 or more replicas of as many; start them with torchrun")
    if flags.replicate < 1 or flags.dp % flags.replicate:
        parser.error(f"--replicate {flags.replicate}: expected a divisor of {flags.dp}, the ranks that are not tensor parallel")
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if flags.device == "auto":
        flags.device = "cuda" if enough else "cpu"
    elif flags.device == "cuda" and not enough:
        parser.error("--device cuda: fewer GPUs than ranks on this machine")
    flags.dtype = torch.bfloat16 if flags.device == "cuda" else torch.float32
    try:
        flags.args = ModelArgs(dim=flags.dim, num_layers=flags.layers, hidden_dim=3 * flags.dim, max_seq_len=flags.seq)
        check_divides(flags.args, flags.tp)
    except ValueError as error:
        parser.error(str(error))
    flags.overlap = flags.overlap or ("auto" if flags.device == "cuda" else "split")  # on CPUs, this model is too small to pay
    flags.options = {"overlap": flags.overlap, "inner": flags.inner, "scatter_first": flags.scatter_first}
    if flags.overlap == "split":
        flags.options |= {"overlap": "off", "overrides": [{"strategy": "split"}]}
    return flags


def build_mesh(flags: argparse.Namespace) -> DeviceMesh:
    """Return the mesh of all ranks. Tensor-parallel ranks are neighbors, then those that share a copy of the shards.

    A dimension of a tensor that both split is split by tensor parallelism first: for DTensor this is the mesh (tp, ..., dp).
    fully_shard expects (..., dp, tp), and does the same.
    """
    sizes = {"replicate": flags.replicate, "dp": flags.dp // flags.replicate, "tp": flags.tp}
    order = ("replicate", "dp", "tp") if flags.form == "fsdp2" else ("tp", "replicate", "dp")
    names = [name for name in order if name == "dp" or sizes[name] > 1]
    ranks = torch.arange(flags.ranks).view(*sizes.values()).permute(*map(list(sizes).index, order))
    return DeviceMesh(flags.device, ranks.reshape([sizes[name] for name in names]), mesh_dim_names=tuple(names))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dims of `mesh` that have batches of their own."""
    assert mesh.mesh_dim_names is not None
    names = tuple(name for name in mesh.mesh_dim_names if name != "tp")
    return mesh[names] if len(names) > 1 else mesh[names[0]]


def build_model(flags: argparse.Namespace) -> Transformer:
    """Return the whole model. All ranks draw the same weights."""
    model = Transformer(flags.args)
    model.init_weights(seed=0)
    rope = model.rope.to(flags.device)
    model.to(flags.device, flags.dtype)
    model.rope = rope  # angles stay in fp32
    return model


def distribute(flags: argparse.Namespace, mesh: DeviceMesh) -> tuple[Transformer, Callable[[Tensor], Tensor]]:
    """Return the sharded model and its compiled forward."""
    model = build_model(flags)
    if flags.tp > 1:
        parallelize(model, mesh["tp"])
    if flags.form == "graph":
        shard_parameters(model, mesh)
        # Backward gathers the weights again instead of keeping them, next to its reductions.
        options = {**flags.options, "memory_budget": 0}
        return model, torch.compile(model, backend="ub_overlap", options=options)
    for block in model.layers:
        fully_shard(block, mesh=data_mesh(mesh))
        block.compile(backend="ub_overlap", options=flags.options)
    fully_shard(model, mesh=data_mesh(mesh))
    ub_overlap.fsdp.install(model)
    return model, model


class Training:
    """A model and its optimizer. `replicas`: the shares of each batch that it computes."""

    def __init__(
        self, model: nn.Module, forward: Callable[[Tensor], Tensor], replicas: range, flags: argparse.Namespace
    ) -> None:
        self.model, self.forward, self.replicas, self.flags = model, forward, replicas, flags
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), foreach=False)

    def compute_gradients(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Run forward and backward over `batches`. Return the mean loss of `replicas`."""
        total = torch.zeros((), device=self.flags.device)
        for batch in batches:
            tokens, targets = (torch.cat([t.chunk(self.flags.dp)[i] for i in self.replicas]) for t in batch)
            logits = self.forward(tokens.to(self.flags.device))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(self.flags.device)) / len(batches)
            loss.backward()
            total += loss.detach()
        return total.item()

    def update(self) -> None:
        """Clip the gradients, and run the optimizer."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.flags.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def gradient_error(model: nn.Module, plain: nn.Module) -> float:
    """Return the largest error of any rank's gradients, relative to the largest one of each parameter. On all ranks."""
    errors: list[Tensor] = []
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None, name
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        errors.append((gradient - other.grad).abs().max() / other.grad.abs().max())
    largest = torch.stack(errors).max()  # NaN if one is
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def steps_of(flags: argparse.Namespace) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield the batches of each step, those of all replicas together."""
    batches = TextBatches(load_corpus(), batch=flags.dp * flags.batch, seq=flags.seq, seed=0)
    for _ in range(flags.steps):
        yield [batches.next() for _ in range(flags.accumulate)]


def summary(flags: argparse.Namespace) -> str:
    """Return what is overlapped: the sites of the graphs, and the calls of fully_shard's collectives."""
    text = str(ub_overlap.reports())
    calls = {name: stats.calls for name, stats in ub_overlap.site_stats().items() if name.startswith("/fsdp")}
    return "\n".join([text, *(f"{name}: {count} calls over our transport" for name, count in sorted(calls.items()))])


def train(flags: argparse.Namespace) -> int:
    """Run one rank and return the exit code."""
    rank, mesh = dist.get_rank(), build_mesh(flags)
    say: Callable[[Any], None] = (lambda text: print(text, flush=True)) if rank == 0 else lambda _: None
    replica = rank // flags.tp
    model, forward = distribute(flags, mesh)
    runs = [Training(model, forward, range(replica, replica + 1), flags)]
    if flags.check:
        plain = build_model(flags)
        runs.append(Training(plain, plain, range(flags.dp), flags))
    if flags.checkpoint and Path(flags.checkpoint, ".metadata").exists():
        for run in runs:  # the plain model too: DCP fits shards to any form
            run.load(flags.checkpoint)
        say(f"went on from {flags.checkpoint}")
    shards = f"{flags.replicate} x {flags.dp // flags.replicate} data-parallel"
    say(f"{shards} x {flags.tp} tensor-parallel ranks on {flags.device}, {flags.form}, options {flags.options}")
    worst = 0.0
    for number, batches in enumerate(steps_of(flags)):
        # After two steps all is compiled: anything else is an error.
        with torch.compiler.set_stance("fail_on_recompile" if number > 1 else "default"):
            losses = [run.compute_gradients(batches) for run in runs]
        if flags.check and number == 0:
            say(f"gradients of the first step: error {gradient_error(*(run.model for run in runs)):.1e}")
        for run in runs:
            run.update()
        mean = torch.tensor(losses[0], device=flags.device)
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        losses[0] = mean.item() / flags.ranks
        say(f"step {number}: loss {losses[0]:.5f}" + (f", on one process {losses[1]:.5f}" if flags.check else ""))
        if flags.check:
            worst = max(worst, abs(losses[0] - losses[1]) if all(map(math.isfinite, losses)) else math.inf)
    if flags.checkpoint:
        runs[0].save(flags.checkpoint)
    say(summary(flags))
    if not flags.check:
        return 0
    allowed = TOLERANCE[flags.dtype]
    agree = worst <= allowed
    say(f"the losses {'agree' if agree else 'DO NOT AGREE'}: largest difference {worst:.1e}, allowed {allowed:.0e}")
    return 0 if agree else 1


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
