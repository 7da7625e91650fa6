"""Scatters of sorted rows become reads with the same values, and their look-alikes stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.expert_parallel.model import SIZES, ExpertLayer, make_routes
from tests.harness.ranks import RankPool
from ub_overlap.compiler.joint.sorted_rows import gather_sorted_rows
from ub_overlap.compiler.passes import JointPass

T, K, D = 6, 2, 4
N = T * K
SORTS = (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)
SCATTERS = ("aten.index_put.default", "aten.index_add.default", "aten.scatter_add.default")


def put_back(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(rows).index_put((torch.argsort(keys),), rows)


def gradient_of_sorted(keys: Tensor, rows: Tensor) -> Tensor:
    return rows.new_zeros(N, D).index_put((torch.argsort(keys, stable=True),), rows, accumulate=True)


def gradient_of_tokens(keys: Tensor, rows: Tensor) -> Tensor:
    return rows.new_zeros(T, D).index_put((torch.argsort(keys) // K,), rows, accumulate=True)


def sum_of_a_token(keys: Tensor, rows: Tensor) -> Tensor:
    order = torch.sort(keys, descending=True)[1]
    tokens = torch.div(order, K, rounding_mode="floor")
    return torch.zeros(T, D).index_add(0, tokens, rows)


def two_of_one_order(keys: Tensor, rows: Tensor) -> Tensor:
    order = torch.argsort(keys)
    return put_back(keys, rows) + torch.zeros(T, D).index_add(0, order // K, rows).repeat(K, 1) + rows[order]


def of_three_dims(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.full((T, 2, 2), 0.0).index_add(0, torch.argsort(keys) // K, rows.view(N, 2, 2))


def as_torchtitan(keys: Tensor, rows: Tensor) -> Tensor:
    tokens = (torch.argsort(keys, stable=True) // K).reshape(-1, 1).expand(-1, D)
    return torch.zeros(T, D).scatter_add(0, tokens, rows)


def nested(keys: Tensor, rows: Tensor) -> Tensor:
    """Rows of one scatter are those of another, and its target."""
    first = torch.zeros(T, D).index_add(0, torch.argsort(keys) // K, put_back(-keys, rows))
    return first.index_put((torch.argsort(keys[:T]),), first * 2)


def of_copied_zeros(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(T, D).detach().clone().index_add(0, torch.argsort(keys).clone().int() // K, rows)


def of_other_strides(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(N, 2, 2).index_put((torch.argsort(keys),), rows.view(N, 2, 2).transpose(1, 2)).view(N, D)


MATCHED = [
    put_back, gradient_of_sorted, gradient_of_tokens, sum_of_a_token, two_of_one_order, of_three_dims, as_torchtitan, nested,
    of_copied_zeros, of_other_strides,
]  # fmt: skip


def onto_other_rows(keys: Tensor, rows: Tensor) -> Tensor:
    return rows.index_put((torch.argsort(keys),), rows, accumulate=True)


def into_more_rows(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(N + 1, D).index_put((torch.argsort(keys),), rows, accumulate=True)


def into_more_tokens(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(T + 1, D).index_add(0, torch.argsort(keys) // K, rows)


def one_of_a_token(keys: Tensor, rows: Tensor) -> Tensor:
    """Without an addition the last row of a token stays, whichever that is: here all are equal."""
    return torch.zeros(T, D).index_put((torch.argsort(keys) // K,), torch.ones_like(rows))


def part_of_an_order(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(N, D).index_put((torch.argsort(keys)[: N - 1],), rows[: N - 1], accumulate=True)


def no_order(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(N, D).index_put((keys.long() % N,), rows, accumulate=True)


def sorted_keys(keys: Tensor, rows: Tensor) -> Tensor:
    """The values of a sort, not its order."""
    return torch.zeros(N, D).index_put((torch.sort(keys.long() % N)[0],), rows, accumulate=True)


def columns(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(D, N).index_add(1, torch.argsort(keys), rows.t())


def second_dim(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(D, N).index_put((torch.arange(D)[:, None], torch.argsort(keys)[None]), rows.t(), accumulate=True)


def one_row_for_all(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(N, D).index_put((torch.argsort(keys),), rows[:1], accumulate=True)


def with_a_factor(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(T, D).index_add(0, torch.argsort(keys) // K, rows, alpha=2)


def order_of_rows(keys: Tensor, rows: Tensor) -> Tensor:
    """Orders of several rows, one behind another: places repeat."""
    return torch.zeros(N, D).index_put((torch.argsort(keys.view(2, T), dim=1).view(-1),), rows, accumulate=True)


def other_places_in_columns(keys: Tensor, rows: Tensor) -> Tensor:
    index = torch.stack([torch.argsort(keys), torch.argsort(-keys)], dim=1).repeat(1, D // 2)
    return torch.zeros(N, D).scatter_add(0, index, rows)


def some_columns(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(N, D).scatter_add(0, torch.argsort(keys)[:, None].expand(-1, D - 1), rows[:, : D - 1])


def one_place_for_all(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(N, N).scatter_add(0, torch.argsort(keys)[None].expand(N, -1), rows.repeat(1, N // D))


def integers(keys: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(T, D, dtype=torch.int32).index_add(0, torch.argsort(keys) // K, rows.int())


def zeros_that_are_written(keys: Tensor, rows: Tensor) -> Tensor:
    target = torch.zeros(N, D)
    target[0] = 1
    return target.index_put((torch.argsort(keys),), rows, accumulate=True)


def an_order_that_is_written(keys: Tensor, rows: Tensor) -> Tensor:
    order = torch.argsort(keys)
    order[:T].fill_(0)
    return torch.zeros(N, D).index_put((order,), rows, accumulate=True)


def a_copy_that_is_written(keys: Tensor, rows: Tensor) -> Tensor:
    order = torch.argsort(keys).clone()
    order[:T].fill_(0)
    return torch.zeros(N, D).index_put((order,), rows, accumulate=True)


def tokens_that_are_written(keys: Tensor, rows: Tensor) -> Tensor:
    tokens = torch.argsort(keys) // K
    tokens[:T].fill_(0)
    return torch.zeros(T, D).index_add(0, tokens, rows)


def a_mask(keys: Tensor, rows: Tensor) -> Tensor:
    mask = torch.argsort(keys).bool()
    return torch.zeros(N, D).index_put((mask,), rows[:1], accumulate=True)


def a_square(keys: Tensor, rows: Tensor) -> Tensor:
    """Each column of the index has one number, not each row."""
    return torch.zeros(N, N).scatter_add(0, torch.argsort(keys).expand(N, N), rows.repeat(1, N // D))


LOOK_ALIKES = [
    onto_other_rows, into_more_rows, into_more_tokens, one_of_a_token, part_of_an_order, no_order, sorted_keys, columns,
    second_dim, one_row_for_all, with_a_factor, order_of_rows, other_places_in_columns, some_columns, one_place_for_all,
    integers, zeros_that_are_written, an_order_that_is_written, a_copy_that_is_written, tokens_that_are_written,
    a_mask, a_square,
]  # fmt: skip


def traced(function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> tuple[GraphModule, Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    keys, rows = torch.randint(0, 4, (N,), generator=made).float(), torch.randn(N, D, generator=made).to(dtype)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (keys, rows)]
        return make_fx(function)(*fakes), keys, rows


def scatters(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if str(node.target) in SCATTERS]


@pytest.mark.parametrize("function", MATCHED)
def test_reads_have_the_same_values(function: Callable[..., Tensor]) -> None:
    gm, keys, rows = traced(function)
    count = len(scatters(gm.graph))
    assert count and gather_sorted_rows(gm.graph) == count and not scatters(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(keys, rows), function(keys, rows))
    inverses = [node for node in gm.graph.nodes if node.target is torch.ops.aten.scatter.src]
    assert len(inverses) == len({node for sort in SORTS for node in gm.graph.find_nodes(op="call_function", target=sort)})
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
        assert node.meta["val"].shape[0] in (N, T)


def test_one_row_for_all_where_the_number_is_not_known() -> None:
    """index_put repeats one row. A graph of any number of rows does so too."""

    def put(keys: Tensor) -> Tensor:
        row = keys.sum() * torch.ones(1, D)
        return torch.zeros(keys.shape[0], D).index_put((torch.argsort(keys),), row, accumulate=True)

    gm = make_fx(put, tracing_mode="symbolic")(torch.randn(N))
    assert gather_sorted_rows(gm.graph) == 1
    gm.recompile()
    for count in (N, 3):
        keys = torch.randn(count)
        assert torch.equal(gm(keys), put(keys))


def test_sums_are_rounded_once() -> None:
    def sums(keys: Tensor, rows: Tensor) -> Tensor:
        return torch.zeros(2, D, dtype=rows.dtype).index_add(0, torch.argsort(keys) // 6, rows)

    gm, keys, rows = traced(sums, torch.bfloat16)
    assert gather_sorted_rows(gm.graph) == 1
    gm.recompile()
    inverse = torch.argsort(torch.argsort(keys))
    assert torch.equal(gm(keys, rows), rows.double()[inverse].view(2, 6, D).sum(1).bfloat16())


@pytest.mark.parametrize("function", LOOK_ALIKES)
def test_look_alikes_stay(function: Callable[..., Tensor]) -> None:
    gm, keys, rows = traced(function)
    before = scatters(gm.graph)
    assert before and gather_sorted_rows(gm.graph) == 0 and scatters(gm.graph) == before
    assert torch.equal(gm(keys, rows), function(keys, rows))


def run_layer(rank: int, world: int, routing: str, inner: str) -> dict[str, Any]:
    """Return the scatters in front of the pass and behind it, and the largest error of a step against eager code."""
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    torch.manual_seed(rank)
    sizes, tokens = SIZES["tiny"], 32 * (rank + 1)
    if routing == "one expert":
        routes = torch.zeros(tokens, sizes.top, dtype=torch.long), torch.rand(tokens, sizes.top)
    else:
        routes = make_routes(tokens, 2 * world, sizes.top, routing, rank)
    layer = ExpertLayer(sizes, 2, routes, dist.group.WORLD, True).bfloat16()
    x = torch.randn(tokens, sizes.dim).bfloat16().requires_grad_()
    found: dict[str, Any] = {"scatters": []}
    call = JointPass.__call__

    def count(self: JointPass, graph: torch.fx.Graph) -> None:
        before = scatters(graph)
        call(self, graph)
        found["scatters"].append((len(before), len(scatters(graph))))

    results = []
    JointPass.__call__ = count  # type: ignore[method-assign]
    try:
        for overlap in ("eager", "off", "force"):
            options = {"inner": inner, "overlap": overlap}
            step = layer if overlap == "eager" else torch.compile(layer, backend="ub_overlap", options=options, fullgraph=True)
            for leaf in (x, *layer.parameters()):
                leaf.grad = None
            out = step(x)
            out.float().square().sum().backward()
            results.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
    finally:
        JointPass.__call__ = call  # type: ignore[method-assign]
    pairs = [(a.double(), b.double()) for result in results[1:] for a, b in zip(result, results[0], strict=True)]
    found["error"] = max(float((a - b).norm() / b.norm().clamp(1e-9)) for a, b in pairs)
    return found


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("inner", "routing"),
    [
        ("aot_eager", "balanced"),
        ("aot_eager", "skewed"),
        ("aot_eager", "one expert"),
        ("inductor", "skewed"),
    ],
)
def test_layers_with_experts(pool2: RankPool, inner: str, routing: str) -> None:
    """Forward has two scatters, backward two: of sorted rows and of sums over a token's experts. Results stay as they are."""
    for found in pool2.run(run_layer, routing, inner):
        assert found["scatters"] == [(4, 4), (4, 0)]
        assert found["error"] <= (0 if inner == "aot_eager" else 1e-2), found
