"""cuBLASLt with the fastest of the algorithms that it proposes."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from .clock import quick
from .engines import RandomMatmul

WORKSPACE_BYTES = 32 << 20


class Algorithms:
    """The fastest proposal for some rows of a matmul."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _functions(self) -> ctypes.CDLL:
        self._folder.mkdir(parents=True, exist_ok=True)
        source, target = Path(__file__).with_suffix(".cu"), self._folder / "libalgorithms.so"
        subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fPIC", str(source), "-o", str(target), "-lcublasLt"], check=True)
        functions = ctypes.CDLL(str(target))
        functions.plan.restype = ctypes.c_void_p
        return functions

    @cached_property
    def _workspace(self) -> torch.Tensor:
        return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def fastest(self, x: RandomMatmul, rows: int, count: int = 3) -> tuple[int, Callable[[int], None]]:
        """Return the number of the fastest proposal by short runs, and a call for `rows` rows from a given one on."""
        n, k = x.shape.n, x.shape.k
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        plan = ctypes.c_void_p(self._functions.plan(*map(ctypes.c_int64, (rows, n, k)), size))
        b, workspace = x.b.data_ptr(), self._workspace.data_ptr()

        def run(number: int, first: int) -> None:
            places = (x.a.data_ptr() + first * k * 2, b, x.out.data_ptr() + first * n * 2, workspace)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            error = self._functions.plan_run(plan, number, *map(ctypes.c_void_p, places), size, stream)
            if error:
                raise RuntimeError(f"cuBLASLt: status {error}")

        numbers = range(self._functions.plan_count(plan))
        best = min(numbers, key=lambda number: quick(lambda: run(number, 0), count))
        return best, lambda first: run(best, first)
