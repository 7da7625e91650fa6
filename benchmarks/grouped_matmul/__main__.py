"""Time the grouped matmuls of experts on one GPU, and predict the same.

    python -m benchmarks.grouped_matmul [--seconds 100] [--profile h200] [--json OUT]

Shapes    groups x [M, K] @ [K, N] of equally large groups, by form: nt (forward of experts), nn (gradient of their input), tn
          (gradient of their weights, whose groups divide K), batch (bmm), float8 (nt, with a scale for each row). Shapes are in
          random order, and --seconds bounds them. Operands rotate, so that no cache holds them.
Pieces    the three matmuls and the activation of experts for 24576 rows, whole, and in as many pieces as source ranks, as if
          each began when the rows of its source arrive. "transfer" is what pieces could hide: the time of the dispatch.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ub_overlap.tools.calibrate.world import Burst

from .. import facts
from ..one_process import OneProcess
from .table import FORMS, text

WEIGHTS = [
    (1408, 2048), (2048, 1408), (1536, 5120), (5120, 1536), (768, 2048), (2048, 768), (2048, 7168), (7168, 2048),
    (14336, 4096), (4096, 14336), (2880, 2880), (1024, 1024), (4096, 4096),
]  # fmt: skip
"""Widths of experts: DeepSeek-V2 Lite and V2, Qwen3, DeepSeek-V3, Mixtral, gpt-oss, and squares."""
GROUPS = (1, 2, 4, 8, 16, 20, 32, 64)
ROWS = (16, 48, 64, 128, 160, 256, 384, 512, 1024, 1536, 3072, 6144)
POOL = 1 << 29
"""Elements of each of the two pools that operands are cut from."""
PIECES = (1, 2, 4, 8)
PIECE_ROWS = 4096 * 6
EXPERTS = [("16B", 2048, 1408, 8), ("16B", 2048, 1408, 20), ("236B", 5120, 1536, 8), ("236B", 5120, 1536, 20)]
Shape = tuple[str, int, int, int, int]
"""(form, groups, M, N, K): the sizes of each group's product."""


def shapes(tiny: bool) -> list[Shape]:
    """Return the shapes in random order: the same in all runs."""
    if tiny:
        return [(form, 2, 16, 32, 48) for form in FORMS]
    found = []
    for n, k in WEIGHTS:
        for groups in GROUPS:
            for rows in ROWS:
                is_small = 2 * groups * rows * n * k <= 4e12
                if is_small and max(groups * rows * n, groups * rows * k, groups * n * k) <= POOL:
                    found += [(form, groups, *((n, k, rows) if form == "tn" else (rows, n, k))) for form in FORMS]
    random.Random(0).shuffle(found)
    return found


class Operands:
    """Operands of random normal numbers, cut from two pools."""

    def __init__(self, device: torch.device, elements: int) -> None:
        self.device, self.elements = device, elements
        self.pools = [torch.empty(elements, device=device, dtype=torch.bfloat16).normal_() for _ in range(2)]
        self.float8 = [
            torch.empty(elements, device=device, dtype=torch.float8_e4m3fn) for _ in range(2 * (device.type == "cuda"))
        ]
        for pool, source in zip(self.float8, self.pools, strict=False):
            pool.copy_(source)

    def cut(self, pool: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
        """Return up to 8 tensors of `shape` that do not overlap."""
        count = torch.Size(shape).numel()
        starts = range(0, self.elements - count + 1, -(-count // 256) * 256)
        return [pool[start : start + count].view(shape) for start in starts[:8]]

    def call(self, shape: Shape) -> Callable[[], Any]:
        """Return a call of the product, which takes other operands each time."""
        form, groups, m, n, k = shape
        left, right = self.float8 if form == "float8" else self.pools
        ends = (torch.arange(1, groups + 1, device=self.device) * (k if form == "tn" else m)).to(torch.int32)
        if form == "tn":
            pairs = [
                (x.t(), y) for x, y in zip(self.cut(left, (groups * k, m)), self.cut(right, (groups * k, n)), strict=False)
            ]
        else:
            weights = self.cut(right, (groups, k, n) if form == "nn" else (groups, n, k))
            rights = weights if form == "nn" else [w.transpose(1, 2) for w in weights]
            rows = (groups, m, k) if form == "batch" else (groups * m, k)
            pairs = list(zip(self.cut(left, rows), rights, strict=False))
        scales = torch.rand(groups * m, device=self.device), torch.rand(groups, n, device=self.device)
        counter = iter(range(1 << 30))

        def run() -> Tensor:
            x, y = pairs[next(counter) % len(pairs)]
            if form == "batch":
                return torch.bmm(x, y)
            if form == "float8":
                return torch._scaled_grouped_mm(x, y, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)
            return torch._grouped_mm(x, y, offs=ends)

        return run


def sweep(burst: Burst, operands: Operands, tiny: bool, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield ("form groups M N K", microseconds) of one shape after the other, for `seconds`."""
    until = time.monotonic() + seconds
    for shape in shapes(tiny):
        form, groups, m, n, k = shape
        if time.monotonic() > until:
            return
        if form == "float8" and not operands.float8:
            continue
        expected_us = 2e-6 * groups * m * n * k / 500 + 8
        us = burst.us(operands.call(shape), max(2, min(12, int(1200 / expected_us))), rounds=3)
        yield " ".join(map(str, shape)), us


def pieces(burst: Burst, device: torch.device, hidden: int, ffn: int, own: int, rows: int) -> dict[str, float]:
    """Return microseconds of an expert layer of one rank by number of pieces."""
    up, gate = (torch.randn(own, ffn, hidden, device=device, dtype=torch.bfloat16).transpose(1, 2) / 40 for _ in range(2))
    down = torch.randn(own, hidden, ffn, device=device, dtype=torch.bfloat16).transpose(1, 2) / 40
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    activation = torch.compile(lambda a, b: F.silu(a) * b, dynamic=False)

    def layer(count: int) -> Callable[[], Any]:
        part = rows // count
        ends = (torch.arange(1, own + 1, device=device) * part // own).to(torch.int32)

        def run() -> None:
            for i in range(count):
                piece = x[i * part : (i + 1) * part]
                inner = activation(torch._grouped_mm(piece, up, offs=ends), torch._grouped_mm(piece, gate, offs=ends))
                torch._grouped_mm(inner, down, offs=ends)

        return run

    times: dict[str, float] = {}
    for count in PIECES:
        run = layer(count)
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        times[str(count)] = burst.us(run, 2, rounds=15)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100.0, help="limit of the shapes")
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--tiny", action="store_true", help="one shape of each form, for a try on a CPU")
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        sys.exit("benchmarks.grouped_matmul: needs a GPU; --tiny runs without")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    process = OneProcess(device)
    burst = Burst(process)  # type: ignore[arg-type]
    burst.settle(1.0)
    document: dict[str, Any] = {"benchmark": "grouped_matmul", **facts.facts(process, "benchmarks.grouped_matmul")}
    document |= {"profile": args.profile, "pieces": []}
    operands = Operands(device, 1 << 14 if args.tiny else POOL)
    document["shapes"] = dict(sweep(burst, operands, args.tiny, args.seconds))
    del operands
    rows = 64 if args.tiny else PIECE_ROWS
    for name, hidden, ffn, own in [("tiny", 32, 16, 2)] if args.tiny else EXPERTS:
        row = {"widths": name, "hidden": hidden, "ffn": ffn, "own": own, "rows": rows}
        document["pieces"].append({**row, "us": pieces(burst, device, hidden, ffn, own, rows)})
    print(text(document), flush=True)
    if args.json:
        facts.write(args.json, document)


if __name__ == "__main__":
    main()
