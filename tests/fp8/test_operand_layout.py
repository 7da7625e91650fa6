"""Under Inductor scaled matmuls get operands in the layouts that GPUs require and the CPU does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fp8.rank_fp8 import ROWS
from ub_overlap import _torch_compat as compat

pytestmark = pytest.mark.tier("test")


class GatedMLP(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.w1, self.w3, self.w2 = (nn.Linear(*s, bias=False) for s in ((dim, inner), (dim, inner), (inner, dim)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


@pytest.mark.tier("full")
@pytest.mark.parametrize("dynamic", [False, True])
def test_layouts_of_scaled_products(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    kernels = compat.__getattr__("extern_kernels")
    plain, seen = kernels._scaled_mm, []

    def watched(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((a.stride(), b.stride()))
        return plain(a, b, *args, **kwargs)

    monkeypatch.setattr(kernels, "_scaled_mm", watched)
    torch._dynamo.reset()
    model = GatedMLP(64, 128).bfloat16()
    compiled: Any = torch.compile(model, backend="ub_overlap", dynamic=dynamic, options={"fp8": "all"})
    with compat.caches_off():
        for tokens in (96, 160) if dynamic else (96,):
            x = torch.randn(1, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
            compiled(x).square().mean().backward()
    assert len(seen) == (12 if dynamic else 9)  # whether a symbolic number of tokens divides by 16 is not known
    assert all(a[1] == 1 and b[0] == 1 for a, b in seen), seen


@pytest.mark.skipif(not ROWS, reason="no scales of rows on this torch's CPU")
def test_scales_of_a_symbolic_number_of_rows() -> None:
    """[rows, 1] as torch's kernels take it: with a stride of 1 in the dim of size 1 too, or they raise."""
    torch._dynamo.reset()
    module = nn.Linear(64, 48, bias=False).bfloat16()
    options = {"fp8": {"products": "forward", "recipe": "rowwise"}}
    compiled: Any = torch.compile(module, backend="ub_overlap", dynamic=True, options=options)
    x = torch.randn(3, 32, 64, dtype=torch.bfloat16)
    with compat.caches_off(), torch.no_grad():
        assert (compiled(x) - module(x)).abs().max() < 0.2
