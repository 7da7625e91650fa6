"""Writes of traced graphs become ops that return new tensors, with the numbers and strides of the graph as traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.graph import aten as aten_module
from ub_overlap.compiler.graph.aten import is_mutable
from ub_overlap.compiler.graph.traced_graph import compute_values
from ub_overlap.compiler.traced import in_place
from ub_overlap.compiler.traced.in_place import replace_writes
from ub_overlap.runtime.errors import OptionError

aten = torch.ops.aten


def attention_mask(x: Tensor, m: Tensor) -> Tensor:
    """The functional masked_fill is contiguous, and the tensor that is masked is not."""
    s = (x * 2).transpose(1, 2)
    s.masked_fill_(m, 0.0)
    return s.transpose(1, 2).view(2, 4, 48)


def columns(x: Tensor, m: Tensor) -> Tensor:
    part = (x * 2)[..., :4]
    part.mul_(3)
    return part + 1


def assigned_parts(x: Tensor, m: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[0] = x[1]
    y[1, 1:3] = x[0, 2:]
    y[:, :, 2] = 5.0
    y[..., ::2].mul_(2)
    return y + 1


def view_and_base(x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Each write to the view is read through the base, and through the view."""
    y = x * 2
    part = y[0]
    first = part.add_(1).sin()
    part.mul_(3)
    return y.exp(), part + first


def transposed_base(x: Tensor, m: Tensor) -> Tensor:
    y = (x * 2).transpose(1, 2)
    y[1].masked_fill_(m[0], 0.0)
    return y.transpose(1, 2).view(2, 4, 48)


def accumulated(x: Tensor, m: Tensor) -> Tensor:
    y = x.clone()
    for _ in range(3):
        y += x.sin()
    return y


WRITES: dict[Callable[..., Any], int] = {
    attention_mask: 1, columns: 1, assigned_parts: 4, view_and_base: 2, transposed_base: 1, accumulated: 3,
}  # fmt: skip


def traced(function: Callable[..., Any]) -> tuple[GraphModule, list[Tensor]]:
    inputs = [torch.randn(2, 4, 6, 8), torch.rand(2, 1, 4, 8) > 0.5]
    gm = make_fx(function)(*inputs)
    compute_values(gm, inputs, "here")
    return gm, inputs


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_numbers_and_strides(function: Callable[..., Any]) -> None:
    gm, inputs = traced(function)
    expected, as_traced = gm(*inputs), copy.deepcopy(gm.graph)
    assert replace_writes(gm.graph, "here") == WRITES[function]
    gm.graph.lint()
    gm.recompile()
    assert not any(map(is_mutable, gm.graph.nodes)) and any(map(is_mutable, as_traced.nodes))
    torch.testing.assert_close(gm(*inputs), expected, rtol=0, atol=0, check_stride=True)

    class CheckValues(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and n.op == "call_function":
                assert (result.shape, result.stride()) == (n.meta["val"].shape, n.meta["val"].stride()), n
            return result

    CheckValues(gm).run(*inputs)


@pytest.mark.tier("test")
def test_inductor_keeps_the_strides() -> None:
    gm, inputs = traced(attention_mask)
    expected = gm(*inputs)
    replace_writes(gm.graph, "here")
    gm.recompile()
    torch.testing.assert_close(torch.compile(gm)(*inputs), expected)


def other_view(x: Tensor, m: Tensor) -> Tensor:
    y = x * 2
    flat = y.view(-1)
    y.add_(1)
    return flat


def part_of_a_split(x: Tensor, m: Tensor) -> Tensor:
    y = x * 2
    torch.split(y, 1)[0].add_(1)
    return y


def elements_beside_the_view(x: Tensor, m: Tensor) -> Tensor:
    part = (x * 2)[1]
    part.add_(1)
    return torch.as_strided(part, (8,), (1,), 0)


def an_input_that_is_read(x: Tensor, m: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@pytest.mark.parametrize("function", [other_view, part_of_a_split, elements_beside_the_view, an_input_that_is_read])
def test_refused_writes(function: Callable[..., Any]) -> None:
    gm, _ = traced(function)
    with pytest.raises(OptionError, match="writes to memory that is read afterwards"):
        replace_writes(gm.graph, "here")


def higher_order(body: Callable[[Tensor], Tensor]) -> tuple[Graph, Node]:
    """Return a graph with a higher-order op that calls `body`, and that node."""
    root = nn.Module()
    root.body = make_fx(body)(torch.randn(4))
    graph = Graph(root)
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    node = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"), "body", x))
    graph.output((node, x))
    return graph, node


def test_higher_order_ops_that_write() -> None:
    """A subgraph that writes to its input is refused; one that writes to memory of its own is not."""
    graph, node = higher_order(lambda x: x.add_(1).sin())
    assert is_mutable(node)
    with pytest.raises(OptionError, match="writes to memory"):
        replace_writes(graph, "here")
    graph, node = higher_order(lambda x: x.clone().add_(1))
    assert not is_mutable(node) and replace_writes(graph, "here") == 0
    assert is_mutable(graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_mutation))


def test_work_grows_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many layers that add to one residual take twice as many steps."""
    steps = []
    original = aten_module.alias_base
    for module in (aten_module, in_place):
        monkeypatch.setattr(module, "alias_base", lambda node: steps.append(node) or original(node), raising=False)

    def steps_of(layers: int) -> int:
        def residual(x: Tensor) -> Tensor:
            y = x * 2
            for _ in range(layers):
                y += y.view(-1).sin().view(4, 4)
            return y

        with compat.FakeTensorMode():
            gm = make_fx(residual)(torch.empty(4, 4))
        steps.clear()
        assert replace_writes(gm.graph, "here") == layers
        return len(steps)

    assert steps_of(40) <= 2.2 * steps_of(20)
