"""Which nodes of a graph are matmuls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ub_overlap.compiler.graph.matmul import as_matmul, is_matmul


def product(function: Any, *shapes: tuple[int, ...]) -> Any:
    """Return what the only product of a traced function is read as."""
    graph = make_fx(function, tracing_mode="fake")(*(torch.ones(s) for s in shapes)).graph
    (node,) = filter(is_matmul, graph.nodes)
    return as_matmul(node)


def test_a_bias_belongs_to_its_product() -> None:
    matmul = product(torch.addmm, (8,), (4, 16), (16, 8))
    assert matmul.bias.name == "arg0_1" and matmul.lhs.shape == (4, 16) and matmul.rhs.shape == (16, 8)


@pytest.mark.parametrize("factors", [{"alpha": 2}, {"beta": 2}, {"beta": 0}, {"alpha": 0.5, "beta": 0.5}], ids=str)
def test_factors_make_it_none(factors: dict[str, float]) -> None:
    """Look-alikes: the op multiplies, and a site would not."""

    def scaled(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.addmm(bias, x, w, **factors)

    assert product(scaled, (8,), (4, 16), (16, 8)) is None
