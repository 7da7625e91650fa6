"""Problems, proposals and times on the current GPU.

An algorithm is timed as in use: on random numbers, because zeros draw less power and run at higher clocks, and with operands
that are not in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import OptionError
from ..extension import extension
from ..session import device_wait
from .search import Problem
from .store import Library

log = logging.getLogger(__name__)

WORKSPACE_BYTES = 32 << 20
"""As cuda/blas.h has it."""
MEMORY_SHARE = 0.25
"""The buffers take at most this share of the free memory. Operands of a batch may lie far apart, and would span too much."""
CACHE_FACTOR = 2
"""The cache is flushed by writing this many times its size."""
TOLERANCE = 0.02
"""An algorithm whose result differs by more from that of the first proposal, by norm, is not used."""
_PATTERN = 1 << 20
_COMPARED = 1 << 18


class MatmulGpu:
    """The current device, for search.py."""

    def __init__(self) -> None:
        self.device = torch.cuda.current_device()
        self._flush: torch.Tensor | None = None

    def library(self) -> Library:
        """Return what algorithms are valid for."""
        return Library(torch.cuda.get_device_name(self.device), extension().blas_version())

    def problems(self) -> list[Problem]:
        """Return the matmuls that have run."""
        return [
            Problem(key, text, uses, at_peers, tuple(buffers))
            for key, text, uses, _, at_peers, buffers in extension().matmul_problems()
        ]

    def propose(self, key: str, count: int) -> list[bytes]:
        """Return the library's proposals."""
        return extension().propose_matmul_algorithms(key, count)

    def time_call(self, call: Callable[[], object]) -> float:
        """Return the microseconds between the first and the last work of the call on the current stream."""
        return device_wait.time_on_stream(call)

    def prepare(self, problem: Problem, algorithms: Sequence[bytes]) -> Callable[[int], float]:
        """Return a function that times one algorithm. MemoryError or torch.OutOfMemoryError without room for the buffers."""
        needed, free = sum(size for _, _, size, _ in problem.buffers), torch.cuda.mem_get_info(self.device)[0]
        if min(size for _, _, size, _ in problem.buffers) <= 0 or needed > free * MEMORY_SHARE:
            raise MemoryError(f"its operands span {needed >> 20} MiB, and {free >> 20} MiB are free")
        buffers, out = self._buffers(problem)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        flush = self._cache_flush()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        expected: list[torch.Tensor] = []  # the result of the first proposal that runs
        compared: set[int] = set()
        refused: set[int] = set()

        def refuse(index: int, why: str) -> float:
            log.warning("proposal %d for the matmul %s is not used: %s", index, problem.text, why)
            refused.add(index)
            return float("inf")

        def run(index: int) -> float:
            if index in refused:
                return float("inf")
            stream = torch.cuda.current_stream().cuda_stream
            # Read here, so that the buffers live as long as this function: an address alone holds nothing.
            addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
            flush.zero_()  # also hides the host time of the launch
            begin.record()
            try:
                extension().run_matmul_algorithm(problem.key, algorithms[index], addresses, workspace.data_ptr(), stream)
            except OptionError as error:
                return refuse(index, str(error))
            end.record()
            device_wait.wait_for_event("a timed matmul", end)
            if index not in compared:
                compared.add(index)
                expected[1:] = [_sample(out)]
                far, norm = float((expected[-1] - expected[0]).norm()), float(expected[0].norm())
                if not far <= TOLERANCE * norm:
                    return refuse(index, f"its result differs by {far:.2g} from that of the first one, of norm {norm:.2g}")
            return float(begin.elapsed_time(end)) * 1e3

        return run

    def _cache_flush(self) -> torch.Tensor:
        if self._flush is None:
            cache: Any = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or (64 << 20)
            self._flush = torch.empty(CACHE_FACTOR * int(cache), dtype=torch.uint8, device=self.device)
        return self._flush

    def _buffers(self, problem: Problem) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return buffers of random numbers with the problem's sizes and alignments, and the one of the result."""
        generator = torch.Generator(self.device).manual_seed(0)  # of its own: the user's random numbers stay as they are
        buffers = {}
        for name, dtype_name, size, alignment in problem.buffers:
            dtype = getattr(torch, dtype_name)
            offset = alignment % 256  # torch's allocations are aligned to 512 bytes
            memory = torch.empty(offset + size, dtype=torch.uint8, device=self.device)
            buffer = memory[offset:].view(dtype)
            _fill(buffer, generator, is_scale=name.endswith("_scale"))
            buffers[name] = buffer
        return buffers, buffers["out"]


def _fill(buffer: torch.Tensor, generator: torch.Generator, *, is_scale: bool) -> None:
    """Fill with normal numbers, repeated; a scale with numbers around 1."""
    pattern = torch.randn(min(_PATTERN, buffer.numel()), generator=generator, device=buffer.device)
    pattern = (pattern.abs().add_(0.5) if is_scale else pattern).to(buffer.dtype)
    for start in range(0, buffer.numel(), pattern.numel()):
        part = buffer[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])


def _sample(out: torch.Tensor) -> torch.Tensor:
    return out[:: out.numel() // _COMPARED | 1].float()  # an odd step: all columns take part
