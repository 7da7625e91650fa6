"""Rank function of test_sibling_matmuls.py: layers of a decode step with packed weights."""

from __future__ import annotations

import logging
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


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """Return a list that gets the package's warnings."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ub_overlap").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("ub_overlap").removeHandler(handler)


def run_decode(rank: int, world: int, inner: str, batch: int) -> dict[str, Any]:
    """Compile two layers. Return the groups of matmuls by kind of run, the strategies and the largest error of all runs.

    Also the warnings of the packed run, and of two more after its weights have moved. A process warns once of each graph, so
    `batch` is another one in each call.
    """
    torch.manual_seed(1 + rank)
    model = make_layers(SIZES["tiny"], world, 2, torch.device("cpu"), torch.float32)
    for layer in model.layers:
        layer.make_cache(batch, 4)
    x = torch.randn(batch, 1, SIZES["tiny"].dim)
    dist.broadcast(x, 0)
    groups, error, strategies, warned = {}, 0.0, list[str](), dict[str, list[str]]()
    for kind in ("apart", "packed", "off"):
        if kind == "packed":
            assert len(ub_overlap.pack(model)) == 4
        summing = with_reduce(model, lambda partial: funcol.all_reduce(partial, "sum", world_name()))
        options = {"overrides": [{"strategy": "one_shot"}], "inner": inner, "pack": "off" if kind == "off" else "auto"}
        mark = HISTORY.mark()
        compiled = torch.compile(summing, backend="ub_overlap", fullgraph=True, options=options)
        with uncached(), torch.no_grad(), groups_found() as found, warnings_logged() as logged:
            expected = summing(x).clone()
            got = compiled(x)
            warned[kind] = logged[:]
            if kind == "packed":
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
                for _ in range(2):
                    error = max(error, float((compiled(x) - expected).norm() / expected.norm()))
                warned["moved"] = logged[len(warned[kind]) :]
        groups[kind] = sum(found)
        error = max(error, float((got - expected).norm() / expected.norm()))
        strategies = [str(d.strategy) for plan in HISTORY.since(mark) for d in plan.decisions]
    return {"groups": groups, "error": error, "strategies": strategies, "warned": warned}
