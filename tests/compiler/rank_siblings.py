"""Rank function of test_sibling_matmuls.py: layers of a decode step with packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import ub_overlap
from benchmarks.blocks.model import SIZES
from benchmarks.decode.model import make_layers, with_reduce
from tests.compiler.rank_compile import world_name
from tests.models.compare import uncached
from ub_overlap.compiler import passes
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.rewrite.sibling_matmuls import pack_siblings


@contextmanager
def groups_found() -> Iterator[list[int]]:
    """Return a list that gets the number of packed groups of each graph that is compiled."""
    found: list[int] = []

    def count(*args: Any) -> int:
        found.append(pack_siblings(*args))
        return found[-1]

    passes.pack_siblings = count
    try:
        yield found
    finally:
        passes.pack_siblings = pack_siblings


def run_decode(rank: int, world: int, inner: str) -> dict[str, Any]:
    """Compile two layers. Return the groups of matmuls by kind of run, the strategies and the error of the packed run."""
    torch.manual_seed(1 + rank)
    model = make_layers(SIZES["tiny"], world, 2, torch.device("cpu"), torch.float32)
    for layer in model.layers:
        layer.make_cache(2, 4)
    x = torch.randn(2, 1, SIZES["tiny"].dim)
    dist.broadcast(x, 0)
    groups, error, strategies = {}, 0.0, list[str]()
    for kind in ("apart", "packed", "off"):
        if kind == "packed":
            assert len(ub_overlap.pack(model)) == 4
        summing = with_reduce(model, lambda partial: funcol.all_reduce(partial, "sum", world_name()))
        options = {"overrides": [{"strategy": "one_shot"}], "inner": inner, "pack": "off" if kind == "off" else "auto"}
        mark = HISTORY.mark()
        with uncached(), torch.no_grad(), groups_found() as found:
            expected = summing(x).clone()
            got = torch.compile(summing, backend="ub_overlap", fullgraph=True, options=options)(x)
        groups[kind] = sum(found)
        error = max(error, float((got - expected).norm() / expected.norm()))
        strategies = [str(d.strategy) for plan in HISTORY.since(mark) for d in plan.decisions]
    return {"groups": groups, "error": error, "strategies": strategies}
