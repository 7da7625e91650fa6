"""An addend without dims on the CPU, in a sum on a GPU: torch adds it, so the emitted row must be on the GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.fx import Graph

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.graph.aten import aten
from ub_overlap.compiler.graph.emitter import Emitter
from ub_overlap.compiler.match.site import Addend, Reduction
from ub_overlap.compiler.rewrite.addend import emit_addend


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("factor", [1, -2])
def test_a_cpu_scalar_becomes_a_row_on_the_gpu(dtype: torch.dtype, factor: float) -> None:
    graph, mode = Graph(), compat.__getattr__("FakeTensorMode")()
    matmul, scalar = graph.placeholder("matmul"), graph.placeholder("scalar")
    with mode:
        matmul.meta["val"] = torch.empty(8, 6, device="cuda", dtype=torch.bfloat16)
        scalar.meta["val"] = torch.empty((), dtype=dtype)
    addend = Addend(scalar, factor=factor, shape=(8, 6), is_transposed=False)
    site = cast(Any, SimpleNamespace(addends=(addend,), terms=(SimpleNamespace(node=matmul),), rows=8, cols=6))
    row = emit_addend(Emitter(graph, matmul, {}), cast(Reduction, site))
    assert row is not None and row.target is aten.add.Tensor and row.kwargs["alpha"] == factor
    value = row.meta["val"]
    assert (value.device.type, value.dtype, tuple(value.shape)) == ("cuda", torch.bfloat16, (6,))
