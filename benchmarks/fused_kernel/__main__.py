"""Time the kernel of a fused collective on one GPU, against the residual and norm of Inductor that it contains.

    python -m benchmarks.fused_kernel [--ranks 2,8] [--cols 4096,8192] [--rows 1,16,64] [--json OUT]

The GPU is one rank of a group whose peers are all itself. What it pushes to a peer lands in its own memory, as what that peer
has pushed. So the kernel does all but cross a link, and the time is what a collective costs without one. Microseconds:

norm           residual and RMSNorm by Inductor: what a model without tensor parallelism runs at this place
sum            one-shot all_reduce alone
fused          one-shot all_reduce, residual and RMSNorm, one kernel
behind a matmul   norm and fused as in a decode step: behind a matmul that reads 64 MiB of weights, so that caches are cold;
               the time of matmul and kernel, less that of the matmul
exposed        fused less norm, both behind a matmul: what a collective without a link adds to a layer

All are CUDA graphs of many calls. Results are compared with torch's before and after timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ub_overlap.runtime.extension import extension
from ub_overlap.tools.calibrate.few_tokens import EPSILON, add_norm

from .. import facts
from ..one_process import OneProcess, graph_us
from ..timing import settle
from .table import text

COUNT = 64
"""Calls of a graph."""
MATMUL_BYTES = 64 << 20
ROTATED_BYTES = 1 << 30
"""Of all weights: twenty times the cache."""
BOUND = 2e-2


class Row:
    """The calls of one size. `x`: [rows, cols], of each rank."""

    def __init__(self, device: torch.device, ranks: int, rows: int, cols: int) -> None:
        self.group, self.ranks = extension().testing.FusedAlone(ranks), ranks
        self.x, self.residual = (torch.randn(rows, cols, device=device).bfloat16() for _ in range(2))
        self.weight = torch.randn(cols, device=device).bfloat16()
        self.summed, self.normed = torch.empty_like(self.x), torch.empty_like(self.x)
        self.compiled = torch.compile(add_norm, dynamic=False)
        columns = MATMUL_BYTES // 2 // cols
        count = ROTATED_BYTES // MATMUL_BYTES
        self.weights = [torch.randn(cols, columns, device=device).bfloat16() for _ in range(count)]

    def sum(self) -> None:
        x = self.x
        stream = torch.cuda.current_stream().cuda_stream
        self.group.run(x.data_ptr(), self.summed.data_ptr(), x.shape[0], x.shape[1] * 2, stream=stream)

    def fused(self) -> None:
        x = self.x
        self.group.run(
            x.data_ptr(), self.summed.data_ptr(), x.shape[0], x.shape[1] * 2, self.residual.data_ptr(),
            self.weight.data_ptr(), self.normed.data_ptr(), stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def norm(self) -> tuple[Tensor, Tensor]:
        return self.compiled(self.x, self.residual, self.weight)

    def matmul(self, number: int) -> Tensor:
        return self.x @ self.weights[number % len(self.weights)]

    def check(self) -> None:
        """Raise AssertionError where a result is wrong."""
        self.fused()
        wide = self.x.double() * self.ranks + self.residual.double()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * self.weight.double()
        for found, expected in ((self.summed, wide), (self.normed, normed)):
            error = float((found.double() - expected).norm() / expected.norm())
            assert error < BOUND, f"{self.ranks} ranks, {tuple(self.x.shape)}: differs from torch by {error:.3g} of its norm"
        assert not self.group.has_failed(), "a wait has failed"

    def measure(self, process: OneProcess) -> dict[str, float]:
        """Return microseconds by column."""
        self.check()

        def us(call: Callable[[int], Any]) -> float:
            return graph_us(lambda: [call(i) for i in range(COUNT)][-1], process) / COUNT

        found = {"norm": us(lambda _: self.norm()), "sum": us(lambda _: self.sum()), "fused": us(lambda _: self.fused())}
        matmul = us(self.matmul)
        found["norm behind a matmul"] = us(lambda i: (self.matmul(i), self.norm())) - matmul
        found["fused behind a matmul"] = us(lambda i: (self.matmul(i), self.fused())) - matmul
        self.check()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,8", help="comma-separated")
    parser.add_argument("--cols", default="4096,8192", help="of a row, comma-separated")
    parser.add_argument("--rows", default="1,16,64", help="comma-separated")
    parser.add_argument("--json")
    args = parser.parse_args()
    process = OneProcess.on_gpu("benchmarks.fused_kernel")
    square = torch.randn(8192, 8192, device=process.device).bfloat16()
    settle(lambda: square @ square, process)
    document: dict[str, Any] = {"benchmark": "fused_kernel", **facts.facts(process, "benchmarks.fused_kernel"), "rows": []}
    for ranks in map(int, args.ranks.split(",")):
        for cols in map(int, args.cols.split(",")):
            for rows in map(int, args.rows.split(",")):
                us = Row(process.device, ranks, rows, cols).measure(process)
                document["rows"].append({"ranks": ranks, "rows": rows, "cols": cols, "us": us})
    print(text(document), flush=True)
    if args.json:
        facts.write(args.json, document)


if __name__ == "__main__":
    main()
