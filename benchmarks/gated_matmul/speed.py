"""How fast other kernels are than cuBLAS, whole and in the order of shards; nothing waits."""

from __future__ import annotations

from typing import Any

import torch

from .clock import interleaved
from .engines import Quack, RandomMatmul, describe, distinct, ranked
from .library import KernelLibrary
from .shapes import Shape

BOUND = 5e-3
"""Relative error of a result, which bf16 rounds."""


def checked(x: RandomMatmul, body: Any, name: str, expected: torch.Tensor) -> float:
    """Run `body` into an `out` of NaN and return the error. Raises AssertionError where the result is wrong."""
    x.out.fill_(float("nan"))
    body()
    error = x.error(expected)
    assert error < BOUND, f"{name}, {x.shape.name}: relative error {error}"
    return error


def measure(shape: Shape, library: KernelLibrary, quack: Quack | None, rounds: int) -> dict[str, Any]:
    """Return microseconds by variant. Kernels are picked by short runs, then measured again."""
    x = RandomMatmul.random(shape)
    expected = x.expected()
    bodies: dict[str, Any] = {"cublas": x.whole, "pieces": x.pieces}
    for prefix, shards, count in (("whole", 1, 3), ("shards", shape.ranks, 2)):
        for instance, order in distinct(ranked(library, x, shards), count):

            def body(instance: Any = instance, order: Any = order, shards: int = shards) -> object:
                return library.matmul(instance, order, x.a, x.b, x.out, shards)

            bodies[f"{prefix} {describe((instance, order))}"] = body
    if quack:
        present = torch.full((shape.ranks,), 0x01010101, dtype=torch.int32, device="cuda")
        for prefix, flags, count in (("quack whole", None, 2), ("quack shards", present, 1)):
            for _, name, call in quack.ranked(x, flags)[:count]:
                bodies[f"{prefix} {name}"] = call
    errors = {name: checked(x, body, name, expected) for name, body in bodies.items()}
    del expected
    count = 4 if 2e-9 * shape.m * shape.n * shape.k < 200 else 2
    times = interleaved(bodies, rounds, count)
    return {
        "shape": vars(shape),
        "us": {name: us for name, (us, _) in times.items()},
        "spread_us": {name: spread for name, (_, spread) in times.items()},
        "largest_error": max(errors.values()),
    }
