"""Values of sizes that only the device knows, for predictions: rows of exchanges, of experts and of masks are balanced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.fx import Graph

from tests.compiler.rank_compile import build
from tests.harness.ranks import RankPool
from tests.harness.traces import Recorder, as_loss
from tests.models.compare import uncached
from ub_overlap.compiler.cost.assumed_sizes import assume_sizes
from ub_overlap.compiler.cost.site_sizes import hints_of
from ub_overlap.compiler.graph.aten import aten, shape_of
from ub_overlap.compiler.graph.sizes import Size, evaluate_size
from ub_overlap.compiler.match.all_to_all import split_args, split_sizes
from ub_overlap.compiler.match.collectives import Op, find_collectives

MOE = "tests.models.moe"
EXPERTS, LAYERS = 4, 2


def values(graph: Graph, sizes: Iterable[Size]) -> set[int | None]:
    hints = assume_sizes(graph, hints_of(graph))
    return {evaluate_size(s, hints) for s in sizes}


@pytest.mark.tier("full")
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_rows_of_exchanges(pool2: RankPool, is_dynamic: bool) -> None:
    """They follow from tokens times experts per token, in both graphs, also where the number of tokens is dynamic."""
    assert pool2.run(assumed, is_dynamic) == [{"forward": {24}, "backward": {24}}] * 2


def assumed(rank: int, world: int, is_dynamic: bool) -> dict[str, set[int | None]]:
    """Return by phase the values of the splits of exchanges, and of rows that experts get."""
    case = build(rank, world, MOE, {"form": "loop"})
    recorder = Recorder()
    if is_dynamic:
        for tensor in case.inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
    with case.context(), uncached():  # type: ignore[misc]
        as_loss(torch.compile(case.module, backend=recorder)(*case.inputs)).backward()
    found: dict[str, set[int | None]] = {}
    for trace in recorder.traces:
        graph = trace.module.graph
        exchanges = [c for c in find_collectives(graph) if c.op is Op.ALL_TO_ALL and c.node.meta["val"].dtype.is_floating_point]
        splits = [s for c in exchanges for side in split_args(c) for s in split_sizes(side)]
        assert any(not isinstance(s, int) for s in splits)
        found[trace.phase] = values(graph, splits)
    return found


def test_masks(pool2: RankPool) -> None:
    """The experts of a layer share its tokens. Those of another layer, and a mask alone, have nothing to do with them."""
    for rows in pool2.run(masked):
        assert sorted(rows) == [6] * EXPERTS * LAYERS + [24]


class MaskedExperts(nn.Module):
    """Layers of experts whose rows are selected by masks, with an exchange between layers. [T, 8], [T] -> [T, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 8, 8))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for layer in range(LAYERS):
            own, out = (chosen + layer) % EXPERTS, torch.zeros_like(x)
            for e in range(EXPERTS):
                rows = torch.nonzero(own == e).squeeze(1)
                out = out.index_add(0, rows, x[rows] @ self.weight[e])
            x = funcol.all_to_all_single(out, None, None, dist.group.WORLD)
        return x * torch.nonzero(x[:, 0] > 0).shape[0]


def masked(rank: int, world: int) -> list[int | None]:
    """Return the rows of masks."""
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True))
        stack.enter_context(uncached())
        stack.enter_context(torch.no_grad())
        torch.compile(MaskedExperts(), backend=recorder, fullgraph=True)(torch.randn(24, 8), torch.arange(24))
    (trace,) = recorder.traces
    graph = trace.module.graph
    hints: Any = assume_sizes(graph, hints_of(graph))
    return [evaluate_size(shape_of(n)[0], hints) for n in graph.find_nodes(op="call_function", target=aten.nonzero.default)]
