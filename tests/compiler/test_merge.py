"""Merged collectives: sums of reductions and gathers of one tensor, and the graphs that look alike and must stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compiler.rank_compile import FORCE, decisions_of, world_name
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.graph.joint_graph import region_of
from ub_overlap.compiler.joint.merge.merge_collectives import merge_collectives
from ub_overlap.compiler.plan.strategy import Mode
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import settings

c10d = torch.ops._c10d_functional
Function = Callable[..., Tensor | tuple[Tensor, ...]]
GROUPS: list[Any] = []


def scatter(x: Tensor, dim: int = 0, op: str = "sum", group: Any = None) -> Tensor:
    return funcol.reduce_scatter_tensor(x.contiguous(), op, dim, group or world_name())


def gather(x: Tensor, group: Any = None) -> Tensor:
    return funcol.all_gather_tensor(x.contiguous(), 0, group or world_name())


def other_group() -> Any:
    """Return a second group of all ranks."""
    if not GROUPS:
        GROUPS.append(dist.new_group(backend="gloo"))
    return GROUPS[0].group_name


def updated_between(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    first = scatter(x @ w)
    x.add_(1)
    return first + scatter(x @ w)


def chain_updated_between(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The tensor that begins the sum is overwritten after it was read."""
    other = y[:4].clone() @ w
    total = other + scatter(x @ w)
    other.add_(1)
    return (total + scatter(y @ w)) * other


def reduced_in_place(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Products that are overwritten by their sums (transformers' tensor parallelism)."""
    first, second = x @ w, y @ w
    dist.all_reduce(first)
    dist.all_reduce(second)
    return first + second


def read_in_place(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The same, and one product is read before it is overwritten."""
    first, second = x @ w, y @ w
    seen = first.relu()
    dist.all_reduce(first)
    dist.all_reduce(second)
    return first + second, seen


def bias_updated_between(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The vector is overwritten after it was added."""
    bias = w[0].clone()
    first = scatter(x @ w) + bias
    bias.add_(1)
    return (first + (scatter(y @ w) + w[1])) * bias


def transposed(x: Tensor) -> Tensor:
    """[8, 6] -> [4, 6], dense, columns first."""
    return x.t()[:, :4].contiguous().t()


def gathers_updated_between(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    first = gather(x) @ w
    x.add_(1)
    return first, gather(x) @ w


MERGED: dict[str, tuple[Function, int]] = {
    "views after": (lambda x, y, w: scatter(x @ w).view(-1) + scatter(y @ w).view(-1), 1),
    "one is 3d": (lambda x, y, w: scatter(x @ w) + scatter((y @ w).view(8, 1, 12)).view(-1, 12), 1),
    "dim 1 both": (lambda x, y, w: scatter(x @ w, 1) + scatter(y @ w, 1), 1),
    "avg both": (lambda x, y, w: scatter(x @ w, 0, "avg") + scatter(y @ w, 0, "avg"), 1),
    "residual in front": (lambda x, y, w: (scatter(x @ w) + scatter(y @ w)) + x[:1, :1], 1),
    "sum read twice": (lambda x, y, w: (s := scatter(x @ w) + scatter(y @ w), s.relu()), 1),
    "no matmul": (lambda x, y, w: scatter(x.relu()) + scatter(y.tanh()), 1),
    "updated between": (updated_between, 1),
    "chain, updated between": (chain_updated_between, 1),
    "residual first": (lambda x, y, w: (y[:4] @ w + scatter(x @ w)) + scatter(y @ w), 1),
    "residual in the middle": (lambda x, y, w: scatter(x @ w) + (scatter(y @ w) + y[:4] @ w), 1),
    "three on a residual": (lambda x, y, w: ((y[:4] + scatter(x.relu())) + scatter(y.tanh())) + scatter(x * y), 2),
    "views on a residual": (lambda x, y, w: (y[:4].view(-1) + scatter(x).view(-1)) + scatter(y).view(-1), 1),
    "chain, sum read twice": (lambda x, y, w: (s := (y[:4] + scatter(x.cos())) + scatter(y.sin()), s.relu()), 1),
    "reduced in place": (reduced_in_place, 1),
    "two biases": (lambda x, y, w: (scatter(x @ w) + w[0]) + (scatter(y @ w) + w[1]), 1),
    "one bias": (lambda x, y, w: scatter(x @ w) + (w[1] + scatter(y @ w)), 1),
    "copies": (lambda x, y, w: (scatter(x @ w) + w[0]).clone() + (scatter(y @ w) + w[1]).clone().clone(), 1),
    "one vector twice": (lambda x, y, w: (b := w[0] * 2, (scatter(x @ w) + b) + (scatter(y @ w) + b))[1], 1),
    "biases on a residual": (lambda x, y, w: ((scatter(x @ w) + w[0]) + (scatter(y @ w) + w[1])) + y[:4] @ w, 1),
    "three biases on a residual": (
        lambda x, y, w: ((y[:4] @ w + (scatter(x @ w) + w[0])) + (scatter(y @ w) + w[1])) + (scatter((x * y) @ w) + w[2]), 2,
    ),
    "residual, then biases": (lambda x, y, w: (y[:4] @ w + (scatter(x @ w) + w[0])) + (scatter(y @ w) + w[1]), 1),
    "bias, updated between": (bias_updated_between, 1),
    "gathers": (lambda x, y, w: (gather(x) @ w, gather(x).t() @ gather(y), gather(y) @ w), 2),
    "gathers of views": (lambda x, y, w: (gather(x) @ w, gather(x.view(2, 4, 6).view(8, 6)).relu()), 1),
}  # fmt: skip
APART: dict[str, Function] = {
    "chain, other layout": lambda x, y, w: (scatter(x.cos()) + transposed(y)) + scatter(y.sin()),
    "chain, other layout is read": lambda x, y, w: (
        (scatter(x.cos()) + transposed(y)) + scatter(y.sin())
    ).as_strided((24,), (1,)),
    "group": lambda x, y, w: scatter(x @ w) + scatter(y @ w, group=other_group()),
    "dim": lambda x, y, w: scatter((x @ w)[:, :8]).view(4, 8) + scatter((y @ w)[:, :8], 1).reshape(4, 8),
    "op": lambda x, y, w: scatter(x @ w) + scatter(y @ w, 0, "avg"),
    "max": lambda x, y, w: scatter(x @ w, 0, "max") + scatter(y @ w, 0, "max"),
    "cast": lambda x, y, w: scatter(x @ w) + scatter((y @ w).bfloat16()),
    "cast after": lambda x, y, w: scatter((x @ w).bfloat16()).float() + scatter((y @ w).bfloat16()).float(),
    "broadcast": lambda x, y, w: scatter(x @ w) + scatter(y @ w[:, :1]),
    "scaled": lambda x, y, w: scatter(x @ w) * 2 + scatter(y @ w),
    "alpha": lambda x, y, w: torch.add(scatter(x @ w), scatter(y @ w), alpha=2),
    "difference": lambda x, y, w: scatter(x @ w) - scatter(y @ w),
    "transposed": lambda x, y, w: scatter(x[:, :4] @ w[:4, :4]) + scatter(y[:, :4] @ w[:4, :4]).t(),
    "doubled": lambda x, y, w: (s := scatter(x @ w)) + s,
    "matmul with another reader": lambda x, y, w: (scatter(p := x @ w) + scatter(y @ w), p.relu()),
    "kind": lambda x, y, w: scatter(x @ w) + funcol.all_reduce((y @ w)[:4], "sum", world_name()),
    "chain, inner sum read": lambda x, y, w: ((s := y[:4] + scatter(x.cos())) + scatter(y.sin()), s.relu()),
    "in place, product read": read_in_place,
    "biased, then scaled": lambda x, y, w: (scatter(x @ w) + w[0]) * 2 + (scatter(y @ w) + w[1]),
    "biased, read twice": lambda x, y, w: ((s := scatter(x @ w) + w[0]) + scatter(y @ w), s.relu()),
    "vectors, one of them a residual": lambda x, y, w: (
        (scatter(x[:, 0].relu()) + y[:4, 0]).cos() + (scatter(y[:, 1].tanh()) + y[:4, 1])
    ),
    "biased, by rows": lambda x, y, w: (scatter(x @ w) + y[:4, :1]) + (scatter(y @ w) + w[1]),
    "biased, alpha": lambda x, y, w: torch.add(scatter(x @ w), w[0], alpha=2) + (scatter(y @ w) + w[1]),
    "biased, wider": lambda x, y, w: (scatter(x @ w) + w[0].double()) + (scatter(y @ w) + w[1]),
    "biased, doubled": lambda x, y, w: (s := scatter(x @ w) + w[0]) + s,
    "chain, broadcast": lambda x, y, w: (y[:1, :1] + scatter(x @ w)) + scatter((y @ w)[:, :1]),
    "chain, wider": lambda x, y, w: (y[:1].double() + scatter(x.cos())) + scatter(y.sin()),
    "chain, alpha": lambda x, y, w: torch.add(y[:4] + scatter(x.cos()), scatter(y.sin()), alpha=2),
    "chain, inner alpha": lambda x, y, w: torch.add(y[:4], scatter(x.cos()), alpha=2) + scatter(y.sin()),
    "chain, group": lambda x, y, w: (y[:4] + scatter(x.cos())) + scatter(y.sin(), group=other_group()),
    "chain, matmul with another reader": lambda x, y, w: ((y[:4] @ w + scatter(p := x @ w)) + scatter(y @ w), p.relu()),
    "gathers, group": lambda x, y, w: (gather(x) @ w, gather(x, other_group()) @ w),
    "gathers, other tensor": lambda x, y, w: (gather(x) @ w, gather(x.clone() * 1) @ w + gather(y) @ w),
    "gathers, other shape": lambda x, y, w: (gather(x) @ w, gather(x.view(4, 12)) @ w.t()),
    "gathers, updated between": gathers_updated_between,
    "gathers, both returned": lambda x, y, w: (gather(x), gather(x).view(-1)),
}  # fmt: skip


def run(rank: int, world: int, cases: dict[str, int], functions: str) -> dict[str, str]:
    """Return for each case what is wrong: its results, or the number of merged collectives."""
    other_group()
    wrong = {}
    for name, count in cases.items():
        function = MERGED[name][0] if functions == "merged" else APART[name]
        generator = torch.Generator().manual_seed(rank)
        inputs = [torch.randint(-3, 4, s, generator=generator).float() for s in ((8, 6), (8, 6), (6, 12))]
        copies = [t.clone() for t in inputs]
        truth = function(*(t.clone() for t in inputs))
        mark = HISTORY.mark()
        with uncached():
            result = torch.compile(function, backend="ub_overlap", options=FORCE)(*copies)
        decisions = [d for plan in HISTORY.since(mark) for d in plan.decisions]
        pairs = zip(*[o if isinstance(o, tuple) else (o,) for o in (truth, result)], strict=True)
        if not all(torch.allclose(a, b, atol=1e-5) for a, b in pairs):  # small integers: sums are exact
            wrong[name] = "results"
        merged = sum(d.strategy.mode is Mode.MERGED for d in decisions)
        if merged != count:
            wrong[name] = f"{merged} merged: {[(d.id, d.kind, d.detail) for d in decisions]}"
    return wrong


def test_merged(pool2: RankPool) -> None:
    assert pool2.run(run, {name: count for name, (_, count) in MERGED.items()}, "merged") == [{}, {}]


def test_look_alikes_stay_apart(pool2: RankPool) -> None:
    assert pool2.run(run, dict.fromkeys(APART, 0), "apart") == [{}, {}]


def traced(function: Function, *shapes: tuple[int, ...]) -> Graph:
    return make_fx(function, tracing_mode="fake")(*(torch.ones(s) for s in shapes)).graph


def count(graph: Graph, target: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def limited(rank: int, world: int) -> list[tuple[int, int]]:
    """Return the reduce_scatters and gathers that are left, without room for memory and with it.

    The first product, and the first gathered tensor, would live while a large tensor lives.
    """

    def far_apart(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first, seen = scatter(x @ w), gather(v).cumsum(1).sum()
        large = torch.ones(4096, 64).cumsum(0).cumsum(1).cumsum(0).sum()
        return first + scatter(x @ w.cos()), large + seen + gather(v).cumsum(0).sum()

    left = []
    for growth in (0, 1 << 20):
        graph = traced(far_apart, (512, 8), (8, 64), (256, 64))
        merge_collectives(graph, growth)
        graph.lint()
        left.append((count(graph, c10d.reduce_scatter_tensor.default), count(graph, c10d.all_gather_into_tensor.default)))
    return left


@pytest.mark.tier("test")
def test_the_memory_peak_limits_merging(fake2: FakeRanks) -> None:
    assert fake2.run(limited) == [[(2, 2), (1, 1)]]


def tagged(rank: int, world: int) -> list[str]:
    """Return what is wrong with the regions of merged nodes. Gathers of different regions stay apart."""

    def both(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return scatter(x @ w, 1) + scatter(x @ w.cos(), 1), gather(x).sum() * gather(x).relu()

    graph = traced(both, (8, 4), (4, 6))
    add = next(n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor)
    add.meta |= {"partitioner_tag": "is_backward", "ac_graph_id": 3}
    region = region_of(add)
    last_gather = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)[-1]
    last_gather.meta["ac_graph_id"] = 5
    before = set(graph.nodes)
    removed = merge_collectives(graph)
    graph.lint()
    wrong = [n.name for n in graph.nodes if n not in before and region_of(n) != region]
    wrong += [n.name for n in graph.nodes if n.op == "call_function" and "val" not in n.meta]
    new = [n for n in graph.nodes if n not in before]
    return wrong + ([] if removed == 1 and len(new) >= 5 else [f"{removed} removed, {new}"])


@pytest.mark.tier("test")
def test_merged_nodes_keep_their_region(fake2: FakeRanks) -> None:
    assert fake2.run(tagged) == [[]]


def switched_off(rank: int, world: int) -> int:
    """Return the number of merged collectives with `merge_collectives=False`."""
    function, inputs = MERGED["gathers"][0], (torch.ones(8, 6), torch.ones(8, 6), torch.ones(6, 12))
    settings.configure(merge_collectives=False)
    try:
        return sum(d.strategy.mode is Mode.MERGED for d in decisions_of(function, inputs, FORCE))
    finally:
        settings.configure(merge_collectives=True)


@pytest.mark.tier("test")
def test_merging_can_be_switched_off(fake2: FakeRanks) -> None:
    assert fake2.run(switched_off) == [0]


def sized(rank: int, world: int) -> list[str]:
    """Return what is wrong with a graph that adds a dynamic size to a reduction."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = scatter(x.cos()) + x.shape[0]
        return total, (total + scatter(y.sin())) + x.shape[1]

    inputs = [torch.randn(8, 6, generator=torch.Generator().manual_seed(rank + n)) for n in range(2)]
    with uncached():
        got = torch.compile(function, backend="ub_overlap", options=FORCE, dynamic=True, fullgraph=True)(*inputs)
    return [f"result {i}" for i, (a, b) in enumerate(zip(got, function(*inputs), strict=True)) if not torch.allclose(a, b)]


def test_sums_with_sizes(pool2: RankPool) -> None:
    assert pool2.run(sized) == [[], []]


def reduced_three_times(rank: int, world: int) -> list[str]:
    """Return what differs from eager code in a graph whose gathers, and then whose reductions, become one."""

    def function(x: Tensor) -> Tensor:
        parts = [funcol.all_gather_tensor_autograd(x, 0, world_name()) for _ in range(2)]
        y = sum(funcol.reduce_scatter_tensor_autograd(part, "sum", 0, world_name()) for part in parts)
        return funcol.reduce_scatter_tensor_autograd(y, "sum", 0, world_name())

    found = []
    for run in (function, torch.compile(function, backend="ub_overlap", options={"inner": "aot_eager"}, fullgraph=True)):
        x = torch.randn(2 * world, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        with uncached():
            out = run(x)
            out.square().sum().backward()
        found.append((out.detach(), x.grad))
    return [f"value {i}" for i, (a, b) in enumerate(zip(*found, strict=True)) if not torch.allclose(a, b)]


def test_reductions_of_merged_gathers(pool2: RankPool) -> None:
    assert pool2.run(reduced_three_times) == [[], []]
