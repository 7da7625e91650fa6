"""Nodes next to float8 matmuls must keep their numbers: checked on graphs, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from tests.fp8.rank_fp8 import RECIPES, ROWS
from tests.models.compare import uncached
from ub_overlap import fp8_state
from ub_overlap.compiler.fp8.insert.insert_casts import insert_casts
from ub_overlap.compiler.fp8.insert.insert_config import InsertConfig
from ub_overlap.compiler.fp8.recipe import recipe_of
from ub_overlap.compiler.joint.joint_decision import joint_decision
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.reports.history import HISTORY

pytestmark = pytest.mark.tier("test")

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
    insert_casts(graph, InsertConfig(recipe_of("tensorwise"), True))
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


def test_float32_is_left_alone() -> None:
    graph = scaled(lambda x, w, r: (x @ w.t(), x.float() @ r.float().t()), ((32, 64), BF16), ((48, 64), BF16), ((16, 64), BF16))
    assert len(products(graph)) == 1
    (router,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert joint_decision(router).cast.reason is Reason.DTYPE_UNSUPPORTED


def test_operand_layouts() -> None:
    """Left operands are row-major, right operands column-major, whatever the layouts of the values."""
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


def test_a_cast_to_the_same_type_is_no_cast() -> None:
    def same(x: Tensor, w: Tensor) -> Tensor:
        return aten._to_copy(gather(torch.relu(x)), dtype=BF16) @ w.t()

    graph = scaled(same, ((32, 64), BF16), ((48, 64), BF16))
    (product,) = products(graph)
    assert product.args[0].meta["val"].dtype is torch.float8_e4m3fn


def test_linear_after_linear() -> None:
    """The second reads the result of the first; no 16-bit matmul stays; gradients between them are e5m2."""
    graph = scaled(lambda x, v, w: x @ v.t() @ w.t(), ((32, 64), BF16), ((48, 64), BF16), ((16, 48), BF16))
    assert len(products(graph)) == 2 and not graph.find_nodes(op="call_function", target=aten.mm.default)
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32)).bfloat16()
    options = {"fp8": {"recipe": "delayed", "state": "linear after linear"}, "inner": "aot_eager"}
    with uncached():
        torch.compile(module, backend="ub_overlap", options=options)(torch.randn(32, 64, dtype=BF16)).sum().backward()
    assert [key.rpartition("/")[2] for key in fp8_state("linear after linear").state_dict()] == ["x", "x", "dy", "dy"]


class Selected(nn.Module):
    """A linear of some rows of each batch, of as many as `count` says."""

    def __init__(self, count: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(64, 48).bfloat16(), count

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(x[:, : self.count(x)])[None])


@pytest.mark.skipif(not ROWS, reason="no scales of rows on this torch's CPU")
@pytest.mark.parametrize("is_known", [True, False])
def test_sizes_that_no_input_has(is_known: bool) -> None:
    """Half of an input's rows are computed; rows that data decides are not, and the linear stays in high precision."""
    torch._dynamo.reset()
    mark = HISTORY.mark()
    options = {"fp8": {"recipe": "rowwise"}, "inner": "aot_eager"}
    x = torch.randn(3, 32, 64, dtype=BF16)
    module = Selected((lambda x: x.shape[1] // 2) if is_known else (lambda x: (x[0, :, 0] > 0).sum().item()))
    with uncached(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        y = torch.compile(module, backend="ub_overlap", dynamic=True, options=options)(x)
        y.sum().backward()
    assert torch.equal(y, module(x)) != is_known
    casts = [c for p in HISTORY.since(mark) for c in p.casts]
    assert (Reason.DYNAMIC_SHAPE in [c.reason for c in casts if c.role == "forward"]) != is_known


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows(recipe: str) -> None:
    """No rows, statically and at run time: the amax of no elements is 0."""
    torch._dynamo.reset()
    module = nn.Linear(64, 48).bfloat16()
    picked: Any = torch.compile(
        lambda x, rows: module(x[rows.nonzero().view(-1)]), backend="ub_overlap",
        options={"fp8": {"recipe": recipe}, "inner": "aot_eager"},
    )  # fmt: skip
    x = torch.randn(4, 64, dtype=BF16, requires_grad=True)
    with uncached(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for mask in (torch.ones(4), torch.zeros(4)):
            y = picked(x, mask)
            assert y.shape == (int(mask.sum()), 48) and y.isfinite().all()
        compiled: Any = torch.compile(module, backend="ub_overlap", options={"fp8": {"recipe": recipe}, "inner": "aot_eager"})
        compiled(x[:0]).sum().backward()
    assert x.grad is not None and (x.grad == 0).all()
    assert module.weight.grad is not None and (module.weight.grad == 0).all()
