"""Recover in the process: a rank is killed, and the others go on with a compiled tensor-parallel model.

    python examples/recovery/shrink.py --ranks 3 --spares 0      the rest shards over 2 ranks
    python examples/recovery/shrink.py --ranks 2 --spares 1      a spare process takes the place of the killed rank

Every attempt has a fresh Store prefix, as torchft's quorums have. The launcher stands for a scheduler: it hosts the Store and
says which processes are in an attempt. State is a checkpoint of full tensors, written after every step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import ub_overlap

TOKENS, WIDTH, HIDDEN = 12, 48, 96
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build(ranks: int, folder: Path) -> tuple[nn.Module, Callable[..., Any], int]:
    """Return (model, compiled model, first step), with the state of the last checkpoint, sharded over `ranks`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    plan: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    first = 0
    if (folder / "checkpoint.pt").exists():
        saved = torch.load(folder / "checkpoint.pt")
        set_model_state_dict(model, saved["model"], options=FULL)
        first = saved["step"] + 1
    options: dict[str, Any] = {"overlap": "force", "inner": "aot_eager"}
    return model, torch.compile(model, backend="ub_overlap", options=options), first


def train(rank: int, ranks: int, steps: int, folder: Path, kill_at: int) -> list[float]:
    """Train from the last checkpoint to `steps`. The rank with `kill_at` >= 0 dies in that step."""
    model, compiled, first = build(ranks, folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(first, steps):
        batch = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
        own = batch.chunk(ranks)[rank]
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        # After two steps all is compiled: anything else is an error.
        with torch.compiler.set_stance("fail_on_recompile" if step > first + 1 else "default"):
            loss = (compiled(own) - own.flip(-1)).square().sum() / batch.numel()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        state = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save({"model": state, "step": step}, folder / "checkpoint.part")
            (folder / "checkpoint.part").rename(folder / "checkpoint.pt")
    if rank == 0:
        found = ub_overlap.reports().metrics("")
        print(f"{found['overlapped']:.0f} of {found['collectives']:.0f} collectives overlapped", flush=True)
    return losses


def recover() -> None:
    """Leave the failed groups, on every rank that lives: the whole of what the runtime and the compiler need."""
    ub_overlap.abort()  # no thread of this process waits any longer, and no peer waits for it
    dist.destroy_process_group()
    torch.compiler.reset()  # compiled graphs hold names and sizes of groups


def run(number: int, port: int, steps: int, folder: str, kill_at: int, results: Any) -> None:
    """Run process `number`: take part in attempts until the training is done."""
    torch.set_num_threads(1)
    ub_overlap.configure(init_timeout_s=60, step_timeout_s=20)
    base = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    attempt, losses = 0, []
    while True:
        base.wait([f"attempt/{attempt}"], timedelta(seconds=120))
        members = [int(member) for member in base.get(f"attempt/{attempt}").decode().split(",")]
        if number in members:
            rank, store = members.index(number), dist.PrefixStore(f"attempt-{attempt}", base)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=len(members), timeout=timedelta(seconds=60))
            try:
                losses = train(rank, len(members), steps, Path(folder), kill_at if attempt == 0 else -1)
                results.put(("done", number, attempt, losses))
                break
            except RuntimeError as error:  # ub_overlap's errors, and c10d's of other collectives
                results.put(("failed", number, attempt, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
                recover()
        attempt += 1
    base.wait(["end"], timedelta(seconds=120))
    os._exit(0)


def main(arguments: list[str] | None = None) -> int:
    """Start the processes and say who is in each attempt. Return 0 if the training ended on all of the last attempt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--spares", type=int, default=0, help="idle processes that take the place of the killed one")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kill-at", type=int, default=3, help="step in which the last rank is killed; -1 for never")
    flags = parser.parse_args(arguments)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results, victim = context.Queue(), flags.ranks - 1
    with TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=run,
                args=(n, store.port, flags.steps, folder, flags.kill_at if n == victim else -1, results),
                daemon=True,
            )
            for n in range(flags.ranks + flags.spares)
        ]
        for process in processes:
            process.start()
        attempt, members = 0, list(range(flags.ranks))
        while True:
            store.set(f"attempt/{attempt}", ",".join(map(str, members)))
            living = [n for n in members if attempt or flags.kill_at < 0 or n != victim]
            reports = [results.get(timeout=180) for _ in living]
            for what, number, _, text in sorted(reports, key=lambda report: report[1]):
                print(f"attempt {attempt} on {len(members)} ranks, process {number}: {what} {text}", flush=True)
            if all(report[0] == "done" for report in reports):
                break
            attempt += 1
            members = [n for n in range(flags.ranks + flags.spares) if n != victim][: flags.ranks]
        store.set("end", "1")
        for process in processes:
            process.join(20)
    return 0 if attempt == (flags.kill_at >= 0) else 1


if __name__ == "__main__":
    sys.exit(main())
