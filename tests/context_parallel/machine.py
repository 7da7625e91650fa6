"""A profile of a slow machine, on which the exchanges of small models on CPU ranks are worth hiding."""

from __future__ import annotations

from dataclasses import replace

from tests.harness.profiles import stored, with_exchanges_as_pushes
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.cost.curve import Curve

SLOWER_COMPUTE, SLOWER_LINK = 1e5, 100


def _slower(curve: Curve) -> Curve:
    return type(curve)((size, us * SLOWER_LINK) for size, us in curve)


def slow_profile() -> str:
    """Return the path of the profile of an H200 with slower arithmetic, memory and links."""
    fast = load("h200")
    compute = replace(
        fast.compute,
        tflops={name: rate / SLOWER_COMPUTE for name, rate in fast.compute.tflops.items()},
        memory_gbs=fast.compute.memory_gbs / 1e3,
    )
    collectives = {kind: {n: _slower(c) for n, c in curves.items()} for kind, curves in fast.collectives.items()}
    slow = replace(
        fast, name="slow", compute=compute, matmuls=(), checks=(), direct=None, push=_slower(fast.push), collectives=collectives
    )
    return stored(with_exchanges_as_pushes(slow))
