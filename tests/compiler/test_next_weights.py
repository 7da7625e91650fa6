"""The weights of the next matmuls, which a fused collective prefetches: which they are, and what must not be taken for one."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import Node

from tests.compiler import rank_fused
from tests.compiler.dags import Dag, aten, c10d
from tests.harness.ranks import RankPool
from ub_overlap import _c10d_compat, _torch_compat
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.select.decide import decide
from ub_overlap.runtime import ops

HIDDEN, INNER = 64, 48
BYTES = HIDDEN * INNER * 2
"""Of one weight."""


@pytest.fixture(autouse=True)
def group() -> Iterator[Any]:
    """The group of a Dag: an all_reduce does not say how many ranks it has."""
    yield _c10d_compat.name_group(dist.HashStore(), 0, 2, Dag.group)
    _torch_compat.unregister_group(Dag.group)


def reduced(d: Dag, x: Node) -> Node:
    return d.call(c10d.wait_tensor.default, d.call(c10d.all_reduce.default, x, "sum", d.group))


def summed(d: Dag) -> Node:
    """The sum of an all_reduce and a residual, through a pointwise op: what the next matmuls read."""
    product = d.mm(d.input("x", 8, HIDDEN), d.input("o", HIDDEN, HIDDEN))
    return d.call(aten.relu.default, d.call(aten.add.Tensor, reduced(d, product), d.input("r", 8, HIDDEN)))


def prefetched(d: Dag, *outputs: Node, limit: int = 1 << 20, **options: Any) -> list[tuple[list[tuple[str, bool]], int, str]]:
    """Rewrite a graph. Return the (name, is transposed) of what each op prefetches, its limit, and the decision's detail."""
    ops.load()
    graph = d.output(*outputs)
    wanted = Options(overrides=[{"strategy": "one_shot"}], prefetch_bytes=limit, **options)
    decided = decide(graph, wanted, "forward", lambda *_: None)
    rewrite(graph, decided.chosen, Outputs(is_backward=False))
    found = []
    calls = graph.find_nodes(op="call_function", target=torch.ops.ub_overlap.fused_collective.default)
    for node, decision in zip(calls, decided.plan.decisions, strict=True):
        weights, bytes = node.args[-5:-3]
        sources = [(w if w.op == "placeholder" else w.args[0], w.op != "placeholder") for w in weights]
        assert all(source.op == "placeholder" for source, _ in sources)
        found.append(([(source.name, transposed) for source, transposed in sources], bytes, decision.detail))
    return found


def linear(d: Dag, x: Node, name: str, cols: int = INNER) -> Node:
    """Append a Linear whose weight is [cols, HIDDEN]."""
    return d.mm(x, d.t(d.input(name, cols, HIDDEN)))


def test_weights_of_linears_and_plain_ones() -> None:
    d = Dag()
    x = summed(d)
    ((weights, bytes, detail),) = prefetched(d, linear(d, x, "w1"), d.mm(x, d.input("w3", HIDDEN, INNER)))
    assert (weights, bytes) == ([("w1", True), ("w3", False)], 2 * BYTES)
    assert f"prefetches up to {2 * BYTES} bytes of the weights of w1, w3" in detail


@pytest.mark.parametrize(("limit", "names"), [(1, ["w0"]), (BYTES, ["w0"]), (BYTES + 1, ["w0", "w1"])])
def test_no_more_weights_than_bytes(limit: int, names: list[str]) -> None:
    d = Dag()
    x = summed(d)
    ((weights, bytes, _),) = prefetched(d, *(linear(d, x, f"w{i}") for i in range(3)), limit=limit)
    assert ([name for name, _ in weights], bytes) == (names, limit)


def test_a_call_has_four_operands_at_most() -> None:
    d = Dag()
    x = summed(d)
    ((weights, bytes, _),) = prefetched(d, *(linear(d, x, f"w{i}") for i in range(6)))
    assert ([name for name, _ in weights], bytes) == ([f"w{i}" for i in range(4)], 4 * BYTES)


def test_one_weight_of_two_matmuls_is_prefetched_once() -> None:
    d = Dag()
    x, w = summed(d), d.input("w", INNER, HIDDEN)
    ((weights, _, _),) = prefetched(d, d.mm(x, d.t(w)), d.mm(d.call(aten.neg.default, x), d.t(w)))
    assert weights == [("w", True)]


def test_each_collective_prefetches_up_to_the_next() -> None:
    d = Dag()
    first = summed(d)
    hidden = linear(d, first, "up", HIDDEN)
    down = d.mm(d.call(aten.relu.default, hidden), d.input("down", HIDDEN, HIDDEN))
    second = d.call(aten.add.Tensor, reduced(d, down), first)  # reads the first result, behind the second collective
    found = prefetched(d, linear(d, second, "q"))
    assert [[name for name, _ in weights] for weights, _, _ in found] == [["up"], ["q"]]


def test_off_by_default() -> None:
    assert Options().prefetch_bytes == 0
    d = Dag()
    ((weights, bytes, detail),) = prefetched(d, linear(d, summed(d), "w"), limit=0)
    assert (weights, bytes) == ([], 0) and "prefetches" not in detail


def computed(d: Dag, x: Node) -> Node:
    """A weight that the graph computes is not in memory yet."""
    return d.mm(x, d.call(aten.neg.default, d.input("w", HIDDEN, INNER)))


def activations(d: Dag, x: Node) -> Node:
    """Both operands come from the collective."""
    return d.mm(x, d.t(d.call(aten.neg.default, x)))


def as_left_operand(d: Dag, x: Node) -> Node:
    return d.mm(d.input("w", INNER, HIDDEN), d.t(x))


def another_matmul(d: Dag, x: Node) -> Node:
    """It reads nothing of the collective."""
    return d.mm(d.input("a", 8, HIDDEN), d.input("w", HIDDEN, INNER))


def behind_a_matmul(d: Dag, x: Node) -> Node:
    return d.mm(d.call(aten.relu.default, d.mm(x, activations(d, d.t(x)))), d.input("w", HIDDEN, INNER))


def behind_attention(d: Dag, x: Node) -> Node:
    return attended(d, x, aten._scaled_dot_product_efficient_attention.default, None, False)


def behind_attention_of_a_cpu(d: Dag, x: Node) -> Node:
    """torch has no formula for its operations."""
    return attended(d, x, aten._scaled_dot_product_flash_attention_for_cpu.default)


def attended(d: Dag, x: Node, op: Any, *more: Any) -> Node:
    heads = d.call(aten.view.default, x, [1, 2, 8, HIDDEN // 2])
    out = d.call(operator.getitem, d.call(op, heads, heads, heads, *more), 0)
    return d.mm(d.call(aten.reshape.default, out, [8, HIDDEN]), d.input("w", HIDDEN, INNER))


def with_gaps(d: Dag, x: Node) -> Node:
    """Neither its rows nor its columns are dense."""
    w = d.input("w", HIDDEN, INNER)
    with d.mode:
        w.meta["val"] = torch.empty_strided((HIDDEN, INNER), (2 * INNER, 2), dtype=d.dtype)
    return d.mm(x, w)


def on_another_device(d: Dag, x: Node) -> Node:
    """The result is copied there first."""
    there, w = d.call(aten.clone.default, x), d.input("w", HIDDEN, INNER)
    for node in (there, w):
        with d.mode:
            node.meta["val"] = torch.empty(node.meta["val"].shape, dtype=d.dtype, device="meta")
    return d.mm(there, w)


def batched(d: Dag, x: Node) -> Node:
    """One matrix of three dims."""
    return d.call(aten.bmm.default, d.call(aten.unsqueeze.default, x, 0), d.input("w", 1, HIDDEN, INNER))


LOOKALIKES = (
    computed, activations, as_left_operand, another_matmul, behind_a_matmul, behind_attention, behind_attention_of_a_cpu,
    with_gaps, on_another_device, batched,
)  # fmt: skip


@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda form: form.__name__)
def test_what_is_no_weight_of_a_next_matmul(form: Any) -> None:
    d = Dag()
    x = summed(d)
    ((weights, bytes, _),) = prefetched(d, form(d, x), x)
    assert (weights, bytes) == ([], 0)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_results_stay_the_same(pool2: RankPool, inner: str) -> None:
    """Two layers on two ranks: every op but the last has a weight to prefetch, and results are those without."""
    for found in pool2.run(rank_fused.run_prefetching, inner):
        assert found["same"], found
        assert ["prefetches" in detail for detail in found["details"]] == [True, True, True, False], found["details"]
