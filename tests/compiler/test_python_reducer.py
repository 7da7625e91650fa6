"""DDP's python_reducer: copies between a weight gradient and its all_reduce do not stand in the way, and look-alikes stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from ub_overlap.compiler.graph.functional_copies import drop_copies
from ub_overlap.compiler.plan.reasons import Kind

from . import rank_python_reducer

COPY, EMPTY, WAIT = (
    torch.ops.aten.copy.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops._c10d_functional.wait_tensor.default,
)


@pytest.mark.parametrize(
    ("options", "strategies"),
    [in_full(({"overlap": "force"}, {"pipelined"})), ({"overrides": [{"strategy": "split"}]}, {"split"})],
    ids=["force", "split"],
)
def test_gradients_are_averaged_in_the_graph(options: dict[str, object], strategies: set[str], pool2: RankPool) -> None:
    """Both weights' all_reduces overlap, in the graph that makes .grad and in the one that adds to it."""
    for bad, plans, copies in pool2.run(rank_python_reducer.traced, options):
        assert bad == []
        assert plans and len(copies) >= 3, (plans, copies)  # forward, and both backward graphs, whose plans may be equal
        for decisions in plans:
            assert len(decisions) == 6 and {phase for phase, _, _ in decisions} == {"backward"}
            overlapped = Counter(strategy.partition(":")[0] for _, _, strategy in decisions)
            assert sum(overlapped[name] for name in strategies) >= 2, decisions
            if strategies == {"pipelined"}:
                assert [kind for _, kind, strategy in decisions if strategy == "pipelined"] == ["matmul_all_reduce"] * 2
        assert set(copies) == {0}


def test_a_sum_of_products(pool2: RankPool) -> None:
    """The gradient of a weight that is used twice is one reduction of both products. The look-alike is scaled by a tensor."""
    for bad, plans in pool2.run(rank_python_reducer.planned, rank_python_reducer.UsedTwice, {"overlap": "force"}):
        assert bad == [] and plans
        for plan in plans:
            summed, scaled = plan.decisions
            assert (summed.kind, str(summed.strategy)) == (Kind.MATMUL_ALL_REDUCE, "pipelined"), summed
            assert summed.work is not None and len(summed.work.matmuls) == 2 and summed.scale == 0.5
            assert scaled.kind is Kind.ALL_REDUCE, scaled


@pytest.mark.tier("full")
def test_sums_are_sent_in_their_own_type(pool2: RankPool) -> None:
    """A bias' gradient is cast to fp32, copied and averaged: bulk sends the sum before the cast.

    The look-alikes: fp32 gradients of the norm, and sums that are added to gradients of the step before.
    """
    options = {"overlap": "force", "overrides": {"*": "bulk"}}
    for bad, plans in pool2.run(rank_python_reducer.planned, rank_python_reducer.Autocast, options):
        assert bad == []
        first, added = ([d for d in plan.decisions if d.shapes[0][1] in ("[64]", "[128]")] for plan in plans)
        types = [[(d.work.dtype, d.work.out_dtype) for d in each if d.work] for each in (first, added)]
        assert types == [[("float32", "")] * 2 + [("bfloat16", "float32")] * 2, [("float32", "")] * 4]
        sent = [d for d in first[2:] if str(d.strategy) == "bulk"]
        assert sent and all("sends bfloat16 and sums in float32" in d.detail for d in sent), first


def chain(make: Callable[[Tensor, Tensor], object]) -> tuple[torch.fx.Graph, int]:
    graph = make_fx(make)(torch.ones(4, 6), torch.ones(6, 5)).graph
    return graph, drop_copies(graph)


def test_a_copied_gradient() -> None:
    """The copy into new memory and the copy of the average over it are both dropped."""

    def gradient(a: Tensor, b: Tensor) -> Tensor:
        product = (a @ b).t().t()
        local = COPY(EMPTY(product, [4, 5], [5, 1]), product)
        return COPY(local, WAIT(local / 2))

    graph, dropped = chain(gradient)
    assert dropped == 2
    assert not [n for n in graph.nodes if n.target in (COPY, EMPTY)]


def read_twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The source is a result as well: both would be one memory."""
    product = a @ b
    return product, COPY(EMPTY(product, [4, 5], [5, 1]), product)


def view_read_twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    product = a @ b
    return product.t(), COPY(EMPTY(product, [4, 5], [5, 1]), product.view(20).view(4, 5))


def input_copied(a: Tensor, b: Tensor) -> Tensor:
    """A result would be an input."""
    return COPY(EMPTY(a, [4, 6], [6, 1]), a.view(24).view(4, 6))


def other_strides(a: Tensor, b: Tensor) -> Tensor:
    product = a @ b
    return COPY(EMPTY(product, [4, 5], [1, 4]), product)


def other_dtype(a: Tensor, b: Tensor) -> Tensor:
    product = a @ b
    return COPY(EMPTY(product, [4, 5], [5, 1], dtype=torch.float64), product)


def broadcast(a: Tensor, b: Tensor) -> Tensor:
    row = (a @ b).sum(0, keepdim=True)
    return COPY(EMPTY(row, [4, 5], [5, 1]), row)


def test_shards_that_are_joined_again() -> None:
    """As dist.all_gather leaves them: copies into tensors of a list, which only a cat reads."""

    def joined(a: Tensor, b: Tensor) -> Tensor:
        product = a @ b
        return torch.cat([COPY(torch.empty(2, 5), product[begin : begin + 2]) for begin in (0, 2)], 1)

    graph, dropped = chain(joined)
    assert dropped == 2
    assert not [n for n in graph.nodes if n.target is COPY or "empty" in n.name]


def joined_and_returned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    copied = COPY(torch.empty(4, 6), a[:, :])
    return copied, torch.cat([copied, a])


def written_before_it_is_joined(a: Tensor, b: Tensor) -> Tensor:
    copied = COPY(torch.empty(4, 6), a[:, :])
    a.mul_(2)
    return torch.cat([copied, a])


LOOKALIKES = [
    read_twice, view_read_twice, input_copied, other_strides, other_dtype, broadcast, joined_and_returned,
    written_before_it_is_joined,
]  # fmt: skip


@pytest.mark.parametrize("make", LOOKALIKES)
def test_copies_that_stay(make: Callable[[Tensor, Tensor], object]) -> None:
    graph, dropped = chain(make)
    assert dropped == 0 and [n for n in graph.nodes if n.target is COPY]
