"""Matmuls of few tokens with weights next to each other are one matmul; look-alikes stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tests.compiler.rank_siblings import run_decode
from tests.harness.ranks import RankPool
from ub_overlap.compiler.graph.graph_inputs import Neighbors
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.sibling_matmuls import MOST_ROWS, pack_siblings
from ub_overlap.runtime import ops  # noqa: F401  (registers packed_weight)

aten = torch.ops.aten
K = 8
SIZES = (6, 2, 4)
"""Rows of the weights, in the order of the function's arguments."""


def adjacent(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return weights [N, K] that lie next to each other."""
    block = torch.randn(sum(SIZES), K).to(dtype)
    return [torch.from_dlpack(part) for part in block.split(SIZES)]


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(x @ w.t() for w in weights)


def batched(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """As a model of [B, 1, K] is traced: each linear has views of its own, and attention's views follow."""
    return tuple((torch.nn.functional.linear(x.view(-1, 1, K), w) * 2).view(x.shape[0], -1, 2).transpose(0, 1) for w in weights)


def flattened(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """A view that the strides of a slice do not allow."""
    return tuple((x @ w.t()).view(-1) + 1 for w in weights)


def with_biases(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.nn.functional.linear(x, w, w[:, 0]) for w in weights)


def of_other_inputs(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple((x + i) @ w.t() for i, w in enumerate(weights))


def transposed(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The weights are summed over their rows: side by side they are no matrix."""
    return tuple(x[:, : w.shape[0]] @ w for w in weights)


def traced(
    function: Callable[..., Any], x: Tensor, weights: list[Tensor], dynamic: bool = False
) -> tuple[GraphModule, Neighbors]:
    """Return the graph, and where its weights lie if they follow each other in the order of the arguments."""
    if dynamic:
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            rows = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
            fakes = [mode.from_tensor(x, symbolic_context=rows), *(mode.from_tensor(w, static_shapes=True) for w in weights)]
        gm = make_fx(function)(*fakes)
    else:
        gm = make_fx(function, tracing_mode="fake")(x, *weights)
    ends = [sum(w.numel() for w in weights[:i]) for i in range(len(weights))]
    places = gm.graph.find_nodes(op="placeholder")[1:]
    return gm, {node: (0, end) for node, end in zip(places, ends, strict=True)}


def pack(gm: GraphModule, neighbors: Neighbors) -> int:
    count = pack_siblings(gm.graph, neighbors, Outputs.of(gm.graph, is_backward=False, restores_strides=False))
    gm.recompile()
    return count


def matmuls(gm: GraphModule) -> int:
    kinds = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    return sum(len(gm.graph.find_nodes(op="call_function", target=kind)) for kind in kinds)


@pytest.mark.parametrize("function", [linears, batched, flattened])
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS])
def test_one_matmul(function: Callable[..., Any], rows: int) -> None:
    weights, x = adjacent(), torch.randn(rows, K)
    gm, neighbors = traced(function, x, weights)
    assert (pack(gm, neighbors), matmuls(gm)) == (1, 1)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.ub_overlap.packed_weight.default)) == 1
    for got, expected in zip(gm(x, *weights), function(x, *weights), strict=True):
        assert got.shape == expected.shape and got.stride() == expected.stride()
        torch.testing.assert_close(got, expected)


def of_biases(x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """Linears with biases, and views of attention behind one of them."""
    found = [torch.nn.functional.linear(x, w, b) for w, b in zip(operands[:3], operands[3:], strict=True)]
    return found[0].view(x.shape[0], -1, 2).transpose(0, 1), *found[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_are_joined(dtype: torch.dtype) -> None:
    """The sum with the bias is rounded once, as before: the results are the same bits."""
    operands = [*adjacent(dtype), *(torch.randn(size).to(dtype) for size in SIZES)]
    x = torch.randn(3, K).to(dtype)
    gm, neighbors = traced(of_biases, x, operands)
    assert (pack(gm, neighbors), matmuls(gm)) == (1, 1)
    assert len(gm.graph.find_nodes(op="call_function", target=aten.addmm.default)) == 1
    for got, expected in zip(gm(x, *operands), of_biases(x, *operands), strict=True):
        assert got.shape == expected.shape and got.stride() == expected.stride()
        torch.testing.assert_close(got, expected, **({"rtol": 0, "atol": 0} if dtype is torch.bfloat16 else {}))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_biases_of_some(place: int) -> None:
    """The others are packed where they lie next to each other."""

    def function(x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        biases = [operands[3] if i == place else None for i in range(3)]
        return tuple(torch.nn.functional.linear(x, w, b) for w, b in zip(operands[:3], biases, strict=True))

    operands, x = [*adjacent(), torch.randn(SIZES[place])], torch.randn(3, K)
    gm, neighbors = traced(function, x, operands)
    groups = int(place != 1)
    assert (pack(gm, neighbors), matmuls(gm)) == (groups, 3 - groups)
    for got, expected in zip(gm(x, *operands), function(x, *operands), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_dynamic_batch() -> None:
    """It is packed as its traced size decides, and is right for others."""
    weights = adjacent()
    gm, neighbors = traced(linears, torch.randn(3, K), weights, dynamic=True)
    assert (pack(gm, neighbors), matmuls(gm)) == (1, 1)
    for rows in (3, 7, MOST_ROWS + 1):
        x = torch.randn(rows, K)
        for got, expected in zip(gm(x, *weights), linears(x, *weights), strict=True):
            torch.testing.assert_close(got, expected)
    gm, neighbors = traced(linears, torch.randn(MOST_ROWS + 1, K), weights, dynamic=True)
    assert (pack(gm, neighbors), matmuls(gm)) == (0, 3)


def test_the_order_of_weights_in_memory_counts() -> None:
    """The graph multiplies by the last weight of the block first."""
    weights, x = adjacent(), torch.randn(2, K)

    def reversed_linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(x @ w.t() for w in reversed(weights))

    gm, neighbors = traced(reversed_linears, x, weights)
    assert (pack(gm, neighbors), matmuls(gm)) == (1, 1)
    for got, expected in zip(gm(x, *weights), reversed_linears(x, *weights), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("function", "rows"), [(with_biases, 2), (of_other_inputs, 2), (transposed, 2), (linears, MOST_ROWS + 1)]
)
def test_look_alikes(function: Callable[..., Any], rows: int) -> None:
    weights = adjacent() if function is not transposed else [torch.randn(4, K) for _ in SIZES]
    gm, neighbors = traced(function, torch.randn(rows, K), weights)
    assert (pack(gm, neighbors), matmuls(gm)) == (0, 3)


def test_weights_apart() -> None:
    """Two blocks, a gap within a block, and weights of which nothing is known."""
    gm, neighbors = traced(linears, torch.randn(2, K), adjacent())
    a, b, c = neighbors
    assert pack(gm, {a: (0, 0), b: (1, 0), c: (2, 0)}) == 0
    assert pack(gm, {a: (0, 0), b: (0, 64), c: (0, 56)}) == 0
    assert pack(gm, {}) == 0
    assert matmuls(gm) == 3
    assert pack(gm, {a: (0, 0), b: (0, 48), c: (0, 96)}) == 1, "two of the three: another weight lies between"
    assert matmuls(gm) == 2


@pytest.mark.tier("full")
@pytest.mark.parametrize(("inner", "batch"), [("aot_eager", 2), ("inductor", 3)])
def test_a_decode_step(pool2: RankPool, inner: str, batch: int) -> None:
    """q, k, v and gate, up of every layer are one matmul each where the model is packed; results are those of eager.

    Weights that move are right, and each group says once that it copies them.
    """
    for outcome in pool2.run(run_decode, inner, batch):
        assert outcome["strategies"] == ["one_shot"] * 4
        assert outcome["groups"] == {"packed": 4, "apart": 0, "off": 0}
        assert outcome["error"] < 1e-4
        warned = outcome["warned"]
        assert not warned["packed"]
        found = [re.search(r"/siblings\.(\d)\. Got: (\d) weights apart", text) for text in warned["moved"]]
        assert sorted(match.groups() for match in found if match) == [("0", "3"), ("1", "2"), ("2", "3"), ("3", "2")], warned
