"""Emitted casts to float8, run as they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx import Graph, GraphModule

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.fp8.cast_nodes import emit_dequantize, emit_quantize, emit_scale
from ub_overlap.compiler.graph.emitter import Emitter

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


def run(x: torch.Tensor, scale: float | None, format: torch.dtype) -> torch.Tensor:
    """Return `x` as a cast leaves it, with a scale given or computed."""
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("x", "scale")]
    values = [x, torch.tensor(scale or 0.0)]
    with compat.FakeTensorMode() as mode:
        for node, value in zip(inputs, values, strict=True):
            node.meta["val"] = mode.from_tensor(value)
    e = Emitter(graph, inputs[0], {})
    by = inputs[1] if scale else emit_scale(e, inputs[0], format, None, ())
    graph.output(emit_dequantize(e, emit_quantize(e, inputs[0], by, format), by, torch.float32))
    return GraphModule(torch.nn.Module(), graph)(*values)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_numbers_out_of_range_become_the_largest_and_the_least(format: torch.dtype) -> None:
    """A delayed scale may be too small for a step."""
    largest = torch.finfo(format).max
    x = torch.tensor([-3 * largest, -largest, -1.0, 0.0, 1.0, largest, 3 * largest])
    expected = torch.tensor([-largest, -largest, -1.0, 0.0, 1.0, largest, largest])
    assert torch.equal(run(x, 1.0, format), expected)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_by_its_own_scale_no_number_is_out_of_range(format: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32) * torch.logspace(-3, 3, 64)[:, None]
    found = run(x, None, format)
    assert (found - x).abs().max() <= x.abs().max() * torch.finfo(format).eps
    assert math.isclose(found.abs().max(), x.abs().max(), rel_tol=1e-6)
