"""What stands beside float8 products and must keep its numbers: read off graphs, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from ub_overlap.compiler.fp8 import Fp8, insert
from ub_overlap.compiler.fp8.insert import CAST
from ub_overlap.compiler.fp8.recipe import recipe_of
from ub_overlap.compiler.plan import Reason

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
BF16 = torch.bfloat16


def gather(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0"))


def scaled(function: Callable[..., Any], *shapes: tuple[tuple[int, ...], torch.dtype]) -> Graph:
    """The graph of `function` after the pass."""
    with FakeTensorMode() as mode:
        inputs = [torch.empty(s, dtype=t) for s, t in shapes]
        graph = make_fx(function)(*inputs).graph
    assert mode is not None
    insert(graph, Fp8(recipe_of("tensorwise"), True))
    graph.lint()
    return graph


def products(graph: Graph) -> list[Any]:
    return list(graph.find_nodes(op="call_function", target=aten._scaled_mm.default))


def test_gathered_counts_and_losses_are_no_gradients() -> None:
    for dtype in (torch.int64, torch.float32, BF16):
        graph = scaled(
            lambda x, w, v: (gather(x) @ w.t(), gather(v).sum(0)), ((32, 64), BF16), ((48, 64), BF16), ((4, 16), dtype)
        )
        assert len(products(graph)) == 1
        carried = [
            n.args[0].meta["val"].dtype
            for n in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
        ]
        assert sorted(map(str, carried)) == sorted(("torch.uint8", str(dtype)))


def test_float32_is_meant() -> None:
    graph = scaled(lambda x, w, r: (x @ w.t(), x.float() @ r.float().t()), ((32, 64), BF16), ((48, 64), BF16), ((16, 64), BF16))
    assert len(products(graph)) == 1
    (router,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert router.meta[CAST].reason is Reason.DTYPE_UNSUPPORTED


def test_operands_lie_as_gpus_multiply_them() -> None:
    """Rows of the left operand and columns of the right one in one piece, however the values came to lie."""
    cases: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, w: torch.relu(x.t()) @ w.t(),
        lambda x, w: x.t() @ w.t(),
        lambda x, w: x.t() @ torch.relu(w).t(),
    ]
    for case in cases:
        (product,) = products(scaled(case, ((64, 32), BF16), ((48, 64), BF16)))
        a, b = (operand.meta["val"] for operand in product.args[:2])
        assert (tuple(a.shape), tuple(b.shape)) == ((32, 64), (64, 48))
        assert (a.stride(1), b.stride(0)) == (1, 1), case
