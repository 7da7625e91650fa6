"""Parity of a site's row count in Python (select/dispatch_table.rows_of) and C++ (csrc/bindings/ops/dispatch.h).

Every op runs with two tables: one changes its strategy at the counted rows, one just below. A call must use the first
bucket of the first table and the last bucket of the second.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.compiler.rank_compile import world_name
from tests.fp8.rank_fp8 import E4M3, gathered, scaled, scattered
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.runtime.stats import site_stats

Graph = Callable[..., Tensor | tuple[Tensor, ...]]
ONE = torch.ones(())


def reduced(x: Tensor) -> Tensor:
    return funcol.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", world_name()))


def scattered_columns(x: Tensor) -> Tensor:
    return scattered(torch.cat(x.chunk(2, 1)))


# name -> (mode, graph, shapes of its inputs); R = 2 ranks.
CASES: dict[str, tuple[str, Graph, tuple[tuple[int, ...], ...]]] = {
    "gather rows": ("pipelined", lambda x, w: gathered(x) @ w, ((6, 8), (8, 4))),
    "gather batched rows": ("pipelined", lambda x, w: gathered(x, 1) @ w, ((3, 4, 8), (8, 4))),
    "gather columns": ("pipelined", lambda x, w: gathered(x, 1) @ w, ((6, 4), (8, 4))),
    "gather and contract": ("pipelined", lambda x, y: gathered(x).t() @ y, ((6, 8), (12, 4))),
    "gather a weight": ("pipelined", lambda w, x: x @ gathered(w).t(), ((6, 8), (10, 8))),
    "scatter rows": ("pipelined", lambda x, w: scattered(x @ w), ((12, 8), (8, 4))),
    "scatter columns": ("pipelined", lambda x, w: scattered_columns(x @ w), ((6, 8), (8, 4))),
    "all_reduce": ("pipelined", lambda x, w: reduced(x @ w), ((6, 8), (8, 4))),
    "bulk gather": ("bulk", lambda x, a, b: (gathered(x), a @ b), ((6, 3, 4), (5, 8), (8, 4))),
    "bulk scatter": ("bulk", lambda x, a, b: (scattered(x), a @ b), ((6, 3, 4), (5, 8), (8, 4))),
    "bulk all_reduce": ("bulk", lambda x, a, b: (reduced(x), a @ b), ((6, 3, 4), (5, 8), (8, 4))),
    "float8 gather": ("pipelined", lambda x, w: scaled(gathered(x), w.t(), ONE, ONE), ((16, 32), (48, 32))),
    "float8 scatter": ("pipelined", lambda x, w: scattered(scaled(x, w.t(), ONE, ONE)), ((32, 32), (48, 32))),
}


def run(graph: Graph, inputs: list[Tensor], override: str) -> tuple[int | None, str, set[str]]:
    """Return (rows of the decision, its strategy, the strategies that ran) of a graph's only overlapped site."""
    torch._dynamo.reset()
    mark = HISTORY.mark()
    options = {"overlap": "force", "inner": "aot_eager", "overrides": {"forward.0": override}}
    with uncached(), torch.no_grad():
        torch.compile(graph, backend="ub_overlap", options=options)(*inputs)
    (plan,) = HISTORY.since(mark)
    (d,) = plan.decisions
    return d.rows, str(d.strategy), set(site_stats()[str(SiteId(plan.digest, d.id))].strategies)


def dispatched(rank: int, world: int) -> dict[str, tuple[int | None, list[set[str]]]]:
    """Return by case the rows counted in Python, and the strategies that ran.

    The first table has its limit at that count, the second one row below.
    """
    found = {}
    for name, (mode, graph, shapes) in CASES.items():
        dtype = E4M3 if name.startswith("float8") else torch.float32
        draw = torch.Generator().manual_seed(7 + rank)
        inputs = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
        rows, _, _ = run(graph, inputs, mode)
        assert rows is not None and rows > 1, name
        tables = [f"{limit}={mode}:chunks=1;*={mode}" for limit in (rows, rows - 1)]
        found[name] = rows, [run(graph, inputs, text)[2] for text in tables]
    return found


@pytest.mark.tier("full")
def test_rows_are_counted_alike(pool2: RankPool) -> None:
    for found in pool2.run(dispatched):
        wrong = {
            name: (rows, ran)
            for name, (rows, ran) in found.items()
            if ran != [{f"{CASES[name][0]}:chunks=1"}, {CASES[name][0]}]
        }
        assert not wrong
        assert found["gather rows"][0] == 12 and found["scatter rows"][0] == 12 and found["bulk gather"][0] == 36
