"""Time collectives of several weights: one split collective for each, against a coalesced one.

    torchrun --nproc-per-node N -m benchmarks.coalesced [--widths 4096,14336] [--rounds 30]

A row is the shards of one layer that are needed at the same place: wq, wk, wv, or w1, w3; gathers and reduce_scatters of bf16.
All starts are issued, then all finishes. Columns: median microseconds on the device and of host time, of the slowest rank; in
CUDA graphs too. Results are compared in bits before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap.compiler.text.table import render_table
from ub_overlap.tools.rank_process import Deadline, World, capture_graph

from .ranks import begin, end
from .timing import Clock, settle

OPS = torch.ops.ub_overlap


def apart(tensors: Sequence[Tensor], collective: str, group: str) -> Callable[[], list[Tensor]]:
    """Return a call that starts a split collective for each tensor, each in a slot of its own, then finishes them."""

    def call() -> list[Tensor]:
        tails = [(collective, "sum", x.dtype, i, False, "bulk", group, f"/apart{i}") for i, x in enumerate(tensors)]
        tokens = [OPS.start_collective(x, *tail) for x, tail in zip(tensors, tails, strict=True)]
        return [OPS.finish_collective(t, x, *tail) for t, x, tail in zip(tokens, tensors, tails, strict=True)]

    return call


def together(tensors: Sequence[Tensor], collective: str, group: str) -> Callable[[], list[Tensor]]:
    """Return a call that starts and finishes a coalesced collective of all tensors."""

    def call() -> list[Tensor]:
        inputs = list(tensors)
        tail = (collective, "sum", [x.dtype for x in inputs], 0, False, "bulk", group, "/coalesced")
        return OPS.finish_coalesced(OPS.start_coalesced(inputs, *tail), inputs, *tail)

    return call


def measure(world: World, name: str, collective: str, shapes: Sequence[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """Return the row of a layer's weights of these whole shapes."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    made = torch.Generator(world.device).manual_seed(world.rank)
    divisor = world.ranks if collective == "all_gather" else 1
    tensors = [
        torch.randn(rows // divisor, cols, generator=made, device=world.device).to(torch.bfloat16) for rows, cols in shapes
    ]
    calls: dict[str, Callable[[], Any]] = {
        "apart": apart(tensors, collective, group),
        "coalesced": together(tensors, collective, group),
    }
    first, second = (call() for call in calls.values())
    if not all(map(torch.equal, first, second)):
        raise AssertionError(f"{name} {collective}: the coalesced collective's results differ")
    clock = Clock(world)
    if world.cuda:
        square = torch.randn(4096, 4096, device=world.device, dtype=torch.bfloat16)
        settle(lambda: square @ square, world)  # no collective: ranks call it as often as their time allows
    times, _ = clock.rounds(calls, rounds, 3)
    row: dict[str, Any] = {"weights": name, "collective": collective, "MiB": sum(x.nbytes for x in tensors) / 2**20}
    row |= {f"{key} us": 1e3 * ms for key, ms in times.items()}
    row |= {f"{key} host us": us for key, us in clock.host(calls, rounds).items()}
    if world.cuda:
        replays = {f"{key} graph us": capture_graph(call, world)[0] for key, call in calls.items()}
        row |= {key: 1e3 * ms for key, ms in clock.rounds(replays, rounds, 3)[0].items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="4096,14336", help="hidden and feed-forward width; keys have a quarter of hidden")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args()
    hidden, ffn = (int(text) for text in args.widths.split(","))
    world = begin("coalesced", args.device, step_timeout_s=20, init_timeout_s=60)
    layers = {"wq wk wv": [(hidden, hidden), (hidden // 4, hidden), (hidden // 4, hidden)], "w1 w3": [(ffn, hidden)] * 2}
    rows = []
    for name, shapes in layers.items():
        for collective in ("all_gather", "reduce_scatter"):
            with Deadline(f"{name} {collective}", 120):
                rows.append(measure(world, name, collective, shapes, args.rounds))
    if world.rank == 0:
        print(render_table(rows, floats=".1f"), flush=True)
    end(world, 0)


if __name__ == "__main__":
    main()
