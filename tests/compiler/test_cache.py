"""Compile caches: an unchanged program hits them in a fresh process, a changed option never reuses an old graph."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ub_overlap
from tests.compiler.rank_compile import build, since
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from tests.harness.traces import as_loss
from tests.models.compare import error
from ub_overlap.compiler.reports.history import HISTORY

MODEL = ("tests.models.megatron", {"dims": 2})
BASE: dict[str, Any] = {"overlap": "force"}


pytestmark = [
    since((2, 12), "AOTAutograd's cache stays unused there, for a reason not found yet"),
    pytest.mark.tier("test"),
]


@dataclass(frozen=True)
class Run:
    """Hits and misses of both caches, number of plans made, error against eager, and rows of the report."""

    hits: tuple[int, int]
    misses: tuple[int, int]
    made: int
    error: float
    explained: list[tuple[str, str, str | None, int | None]]


def run(rank: int, world: int, options: dict[str, Any], explain: bool) -> Run:
    """Compile and run the model, and count cache hits and misses.

    Each rank has its own torch caches. Otherwise a slower rank would hit an entry of a faster one.
    """
    from torch._dynamo.utils import counters

    torch._inductor.config.fx_graph_cache = True
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["UB_OVERLAP_CACHE_DIR"]).with_name(f"inductor{rank}"))
    counters.clear()
    case, eager = (build(rank, world, *MODEL) for _ in range(2))
    as_loss(eager.module(*eager.inputs)).backward()
    mark, rows = HISTORY.mark(), []
    as_loss(torch.compile(case.module, backend="ub_overlap", options=options)(*case.inputs)).backward()
    pairs = zip((*case.inputs, *case.module.parameters()), (*eager.inputs, *eager.module.parameters()), strict=True)
    if explain:
        rows = [(d.id, str(d.strategy), d.executed, d.calls) for d in ub_overlap.reports().decisions]
    worst = max(error(a.grad, b.grad, "gradient") for a, b in pairs)
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    hits = inductor["fxgraph_cache_hit"], autograd["autograd_cache_hit"]
    misses = inductor["fxgraph_cache_miss"], autograd["autograd_cache_miss"]
    return Run(hits, misses, HISTORY.mark() - mark, worst, rows)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("caches")
    return {"UB_OVERLAP_CACHE_DIR": str(root / "ub_overlap")}


@pytest.fixture(scope="module")
def cold(folders: dict[str, str]) -> list[Run]:
    """First run of the program, in processes that exit afterwards."""
    with RankPool(2, env=folders) as pool:
        return pool.run(run, BASE, False)


@pytest.fixture(scope="module")
def warm(folders: dict[str, str], cold: list[Run]) -> Iterator[RankPool]:
    """Fresh processes that use the caches of the first run."""
    with RankPool(2, env=folders) as pool:
        yield pool


def test_cold(cold: list[Run]) -> None:
    for got in cold:
        assert got.made == 2
        assert got.misses[1] == 1 and got.hits == (0, 0)
        assert got.error < 1e-5


@pytest.mark.tier("test")
def test_warm(warm: RankPool) -> None:
    """A warm start runs the ops without any pass, and reports decisions from the plan store."""
    for got in warm.run(run, BASE, True):
        assert got.made == 0
        assert got.hits[1] >= 1 and got.misses == (0, 0)
        assert got.error < 1e-5
        sites = ["forward.0", "forward.1", "backward.0", "backward.1"]
        assert got.explained == [(site, "pipelined", "pipelined", 1) for site in sites]


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "changed",
    [
        {"overrides": {"*": "chunks=4"}},
        *map(in_full, [{"memory_budget": 0}, {"overlap": "off"}, {"overlap": "auto"}]),
        {"overlap": "auto", "min_bytes": 1},
    ],
    ids=str,
)
def test_changed_option(warm: RankPool, changed: dict[str, Any]) -> None:
    for got in warm.run(run, {**BASE, **changed}, False):
        assert got.made == 2
        assert got.hits == (0, 0) and got.misses[1] == 1
        assert got.error < 1e-5


@pytest.mark.tier("test")
def test_unchanged_after_all_that(warm: RankPool) -> None:
    for got in warm.run(run, BASE, False):
        assert got.made == 0 and got.misses == (0, 0)
