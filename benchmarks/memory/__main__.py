"""Time our memory kernels on one GPU.

    python -m benchmarks.memory [--mib 32,128] [--json OUT]

copy: our kernel; copy by the driver: cudaMemcpyAsync; sum of N: N bf16 parts, added in fp32 and rounded once. MiB counts what
is read: the source of a copy, all parts of a sum. TB/s counts bytes read and written.

us               time of one call, as part of a CUDA graph of many calls on rotating buffers, which no cache holds
us off a matmul  how much longer a matmul takes when one such call runs on another stream, as a CUDA graph

Every sum is compared bit by bit with the same sum by torch, before and after timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ub_overlap.runtime.extension import extension
from ub_overlap.tools.rank_process import RankProcess

from .. import facts
from ..one_process import OneProcess, graph_us
from ..timing import settle
from .table import text

ROTATED_BYTES = 1 << 30
"""Bytes of all buffers of a kernel: twenty times the cache."""
MATMUL = (8192, 8192, 8192)
COUNTS = (2, 4, 8)


@dataclass
class MemoryCall:
    """Calls of one kernel on rotating buffers. `parts[i]`: the sources of call i; `outs[i]`: its result."""

    kernel: str
    mib: int
    sources: int
    parts: list[list[Tensor]]
    outs: list[Tensor]

    def run(self, number: int) -> None:
        """Enqueue a call on the current stream."""
        which = number % len(self.outs)
        parts, out, stream = self.parts[which], self.outs[which], torch.cuda.current_stream().cuda_stream
        if self.kernel == "copy by the driver":
            out.copy_(parts[0])  # contiguous, of one type and device: torch calls cudaMemcpyAsync
        elif self.kernel == "copy":
            size = out.nbytes
            extension().testing.run_copy(parts[0].data_ptr(), size, out.data_ptr(), size, 1, size, stream)
        else:
            size, sources = out.nbytes, [(part.data_ptr(), part.nbytes) for part in parts]
            extension().testing.run_sum(sources, "bfloat16", out.data_ptr(), size, "bfloat16", 1, out.numel(), 1.0, stream)

    def check(self) -> None:
        """Raise AssertionError where a result differs from torch's in any bit."""
        for number in range(len(self.outs)):
            self.outs[number].fill_(float("nan"))
            self.run(number)
            expected = self.parts[number][0].float()
            for part in self.parts[number][1:]:
                expected += part.float()
            assert torch.equal(self.outs[number], expected.bfloat16()), (
                f"{self.kernel}, {self.mib} MiB: other bits than torch's"
            )


def prepare(kernel: str, mib: int, sources: int, device: torch.device) -> MemoryCall:
    elements = (mib << 20) // 2 // sources
    sets = max(2, ROTATED_BYTES // ((mib << 20) * (sources + 1) // sources))
    parts = [[torch.randn(elements, device=device).bfloat16() for _ in range(sources)] for _ in range(sets)]
    return MemoryCall(kernel, mib, sources, parts, [torch.empty_like(group[0]) for group in parts])


def measure(call: MemoryCall, matmul: Callable[[], Any], matmul_us: float, process: RankProcess) -> dict[str, Any]:
    """Return a row: `us` alone, and `off_us`, what one call takes off a concurrent matmul."""
    call.check()
    count = 2 * len(call.outs)
    us = graph_us(lambda: [call.run(i) for i in range(count)], process) / count
    concurrent = max(1, int(0.5 * matmul_us / us))
    side = torch.cuda.Stream()

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in range(concurrent):
                call.run(i)
        matmul()
        torch.cuda.current_stream().wait_stream(side)

    off_us = (graph_us(both, process) - matmul_us) / concurrent
    call.check()
    return {
        "kernel": call.kernel,
        "mib": call.mib,
        "sources": call.sources,
        "us": us,
        "off_us": off_us,
        "concurrent": concurrent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="32,128", help="comma-separated sizes")
    parser.add_argument("--json")
    args = parser.parse_args()
    process = OneProcess.on_gpu("benchmarks.memory")
    device = process.device
    m, n, k = MATMUL
    left, right = torch.randn(m, k, device=device).bfloat16(), torch.randn(k, n, device=device).bfloat16()
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)

    def matmul() -> Tensor:
        return torch.mm(left, right, out=out)

    settle(matmul, process)
    document: dict[str, Any] = {"benchmark": "memory", **facts.facts(process, "benchmarks.memory")}
    document |= {"matmul": MATMUL, "matmul_us": graph_us(matmul, process), "rows": []}
    kinds = [("copy", 1), ("copy by the driver", 1), *((f"sum of {count}", count) for count in COUNTS)]
    for mib in map(int, args.mib.split(",")):
        for kernel, sources in kinds:
            document["rows"].append(measure(prepare(kernel, mib, sources, device), matmul, document["matmul_us"], process))
            torch.cuda.empty_cache()
    print(text(document), flush=True)
    if args.json:
        facts.write(args.json, document)


if __name__ == "__main__":
    main()
