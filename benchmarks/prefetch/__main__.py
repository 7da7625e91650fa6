"""Time the matmuls behind a collective of a decode step, with a part of their weights prefetched while it waits. On one GPU.

    python -m benchmarks.prefetch [--size 8b,70b] [--ranks 2,8] [--batch 1,16,64] [--mib 4,8,16,24,32] [--json OUT]

A kernel that waits --wait-us stands for the collective. A second stream prefetches meanwhile, and the matmuls of one rank
follow both: q, k and v, or gate and up. All is one CUDA graph with weights that rotate, so that no cache holds them. The
column "0" prefetches one cache line. No link is used, and the prefetching kernel has the whole device: what prefetches take
from a collective, and how many blocks a fused collective leaves them, is not seen here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ub_overlap.runtime.extension import extension

from .. import facts
from ..blocks.model import SIZES, BlockSizes
from ..one_process import OneProcess, graph_us
from ..timing import settle
from .table import text

ROTATED_BYTES = 512 << 20
"""Bytes of all weights of a row: ten times the cache."""
ROUNDS = 16
"""Of a graph, at least."""
CYCLES_PER_US = 1980
"""Of an H200 that runs matmuls. The wait is also measured."""
Span = tuple[int, int, int, int]
"""(address, runs, stride in bytes, bytes of a run), as Span in csrc/core/call.h."""


def outputs(sizes: BlockSizes, ranks: int) -> dict[str, list[int]]:
    """Return the columns of the matmuls behind each collective of a layer, of one rank."""
    keys = sizes.kv_heads * sizes.head_dim // ranks
    return {"q, k, v": [sizes.dim // ranks, keys, keys], "gate, up": [sizes.wide // ranks] * 2}


def first_parts(weights: list[Tensor], limit: int) -> list[Span]:
    """Return what a fused collective prefetches of weights [N, K]: of K as much as fits, the first weight first."""
    operands = [(w.data_ptr(), *w.t().shape, *(s * w.element_size() for s in (*w.t().stride(), 1))) for w in weights]
    return [part for part, _ in extension().testing.first_parts(operands, limit)]


class Row:
    """The matmuls of one site on `batch` tokens."""

    def __init__(self, device: torch.device, columns: list[int], depth: int, batch: int) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = sum(columns) * depth * dtype.itemsize
        self.bytes = size
        count = -(-ROTATED_BYTES // size) if device.type == "cuda" else 2
        self.rounds = max(ROUNDS, count)
        self.sets = [[torch.randn(n, depth, device=device).to(dtype) for n in columns] for _ in range(count)]
        self.x = torch.randn(batch, depth, device=device).to(dtype)

    def matmuls(self, number: int) -> list[Tensor]:
        return [self.x @ w.t() for w in self.sets[number % len(self.sets)]]

    def body(self, limit: int, wait_us: float) -> Callable[[], list[Tensor]]:
        """Return rounds in a row: each set of weights at least once. `limit`: bytes that are prefetched."""
        if self.x.device.type != "cuda":
            return lambda: [y for i in range(self.rounds) for y in self.matmuls(i)]
        side = torch.cuda.Stream()

        def run() -> list[Tensor]:
            found = []
            for i in range(self.rounds):
                main, weights = torch.cuda.current_stream(), self.sets[i % len(self.sets)]
                side.wait_stream(main)
                torch.cuda._sleep(int(wait_us * CYCLES_PER_US))
                line = [(weights[0].data_ptr(), 1, 0, 1)]
                extension().testing.run_prefetch(first_parts(weights, limit) if limit else line, side.cuda_stream)
                main.wait_stream(side)
                found += self.matmuls(i)
            return found

        return run


def measure(process: OneProcess, row: Row, limits: list[int], wait_us: float) -> dict[str, float]:
    """Return microseconds of a round by MiB, and of the matmuls alone."""
    if process.device.type != "cuda":
        run, begun = row.body(0, 0.0), time.perf_counter()
        run()
        us = 1e6 * (time.perf_counter() - begun) / row.rounds
        return {"matmuls": us, **{str(limit >> 20): us for limit in limits}}
    found = {"matmuls": graph_us(lambda: [row.matmuls(i) for i in range(row.rounds)], process) / row.rounds}
    for limit in limits:
        found[str(limit >> 20)] = graph_us(row.body(limit, wait_us), process) / row.rounds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b,70b", help=f"comma-separated, of {', '.join(SIZES)}")
    parser.add_argument("--ranks", default="2,8", help="comma-separated: the tensor-parallel ranks that share a layer")
    parser.add_argument("--batch", default="1,16,64", help="tokens, comma-separated")
    parser.add_argument("--mib", default="4,8,16,24,32", help="what is prefetched, comma-separated")
    parser.add_argument("--wait-us", type=float, default=6.0)
    parser.add_argument("--cpu", action="store_true", help="show on a CPU that the program works; nothing is prefetched")
    parser.add_argument("--json")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        sys.exit("benchmarks.prefetch: needs a GPU, or --cpu")
    device = torch.device("cpu") if args.cpu else torch.device("cuda", torch.cuda.current_device())
    process = OneProcess(device)
    if not args.cpu:
        square = torch.randn(8192, 8192, device=device).bfloat16()
        settle(lambda: square @ square, process)
    document: dict[str, Any] = {"benchmark": "prefetch", **facts.facts(process, "benchmarks.prefetch")}
    document |= {"wait_us": args.wait_us, "rows": []}
    limits = [0, *(int(mib) << 20 for mib in args.mib.split(","))]
    for size in args.size.split(","):
        for ranks in map(int, args.ranks.split(",")):
            for site, columns in outputs(SIZES[size], ranks).items():
                for batch in map(int, args.batch.split(",")):
                    row = Row(device, columns, SIZES[size].dim, batch)
                    us = measure(process, row, limits, args.wait_us)
                    facts_of_row = {"size": size, "ranks": ranks, "site": site, "batch": batch, "bytes": row.bytes}
                    document["rows"].append({**facts_of_row, "us": us})
    print(text(document), flush=True)
    if args.json:
        facts.write(args.json, document)


if __name__ == "__main__":
    main()
