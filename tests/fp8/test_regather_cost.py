"""When to gather twice, in float8 in forward and in 16 bits in backward: by an H200's profile, without ranks."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.cost.profile_lookup import load
from ub_overlap.compiler.fp8.hoist.gather_readers import GatherReaders, find_readers
from ub_overlap.compiler.fp8.hoist.regather_cost import explain_no_gain
from ub_overlap.compiler.graph.emitter import Emitter

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
RANKS = 4


def traced(rows: int, inner: int, columns: int, format: torch.dtype = torch.float8_e4m3fn) -> GatherReaders:
    """rows/RANKS [.., inner] of a rank -> all_gather -> cast by rows -> _scaled_mm [inner, columns], and the weight gradient of
    the gathered elements in 16 bits."""
    graph, mode = Graph(), compat.__getattr__("FakeTensorMode")()

    def placeholder(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    x = placeholder("x", (rows // RANKS, inner), torch.bfloat16)
    w, sw = placeholder("w", (columns, inner), format), placeholder("sw", (1, columns), torch.float32)
    dy = placeholder("tangents_1", (rows, columns), torch.bfloat16)
    e = Emitter(graph, x, {})
    gather = e.call(c10d.all_gather_into_tensor.default, x, RANKS, "0")
    g = e.call(c10d.wait_tensor.default, gather)
    scale = e.cast(e.call(aten.amax.default, e.call(aten.abs.default, g), [-1], True), torch.float32)
    q = e.cast(e.call(aten.mul.Tensor, e.cast(g, torch.float32), scale), format)
    product = e.call(aten._scaled_mm.default, q, e.transpose(w), scale, sw, None, None, torch.bfloat16, True)
    gradient = e.call(aten.mm.default, e.transpose(dy), g)
    graph.output((product, gradient))
    found = find_readers(gather)
    assert (
        found is not None and set(found.casts) == {q} and found.others == {gradient} and found.find_row_values()[1] == [scale]
    )
    return found


@pytest.mark.parametrize(("columns", "pays"), [(7168, True), (64, False)])
def test_gather_twice_where_both_hide(columns: int, pays: bool) -> None:
    """8192 tokens of 8192 channels: with 7168 columns both gathers hide, with 64 neither does."""
    why = explain_no_gain(traced(8192, 8192, columns), load("h200"), {})
    assert (why == "") is pays, why
    assert pays or why.startswith("predicted exposed us by profile h200")
