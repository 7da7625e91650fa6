"""Inductor's C++ wrapper (`cpp_wrapper=True`) calls our ops: values and gradients are those of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.rank_compile import INDUCTOR, world_name
from tests.fp8.rank_fp8 import NO_ROWS
from tests.harness.ranks import RankPool
from tests.models.compare import error, uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.inductor.op_lowerings import use_flat_results
from ub_overlap.compiler.reports.history import HISTORY

pytestmark = pytest.mark.tier("test")


class Block(nn.Module):
    """A gather with two matmuls, a reduce_scatter, an all_reduce, and a gather without a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(0.2 * torch.randn(64, 96)) for _ in range(2))
        self.down, self.head, self.bias = (nn.Parameter(0.2 * torch.randn(*s)) for s in ((96, 64), (64, 32), (64,)))
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = funcol.all_gather_tensor_autograd(x, 0, world_name())
        h = torch.addmm(self.bias, F.silu(x @ self.gate) * (x @ self.up), self.down)
        shard = funcol.reduce_scatter_tensor_autograd(h, "sum", 0, world_name())
        y = funcol.all_reduce(shard @ self.head, "sum", world_name())
        return y + funcol.all_gather_tensor_autograd(self.shift, 0, world_name())


def run(rank: int, world: int, options: dict[str, Any]) -> tuple[dict[str, float], set[tuple[str, str]]]:
    """Return the errors against eager, and (phase, kind) of the overlapped collectives."""
    torch.manual_seed(rank)
    module = Block().bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    leaves = {"x": x, **dict(module.named_parameters())}

    def values(function: Any) -> dict[str, Tensor | None]:
        for leaf in leaves.values():
            leaf.grad = None
        y = function(x)
        y.square().sum().backward()
        return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}

    eager, mark = values(module), HISTORY.mark()
    with uncached():
        wrapped: Any = torch.compile(module, backend="ub_overlap", options={**INDUCTOR, "cpp_wrapper": True, **options})
        found = values(wrapped)
    decisions = [d for p in HISTORY.since(mark) for d in p.decisions]
    return {n: error(found[n], eager[n], n) for n in eager}, {(d.phase, d.kind.value) for d in decisions if d.overlapped}


FULL = pytest.mark.tier("full")
OPTIONS = [
    pytest.param({}, id="16 bits"),
    pytest.param({"fp8": "all"}, id="float8", marks=FULL),
    pytest.param({"fp8": {"recipe": "rowwise"}, "pack": "force"}, id="packed float8", marks=[NO_ROWS, FULL]),
]


@pytest.mark.tier("full")
@pytest.mark.parametrize("options", OPTIONS)
def test_cpp_wrapper(pool2: RankPool, options: dict[str, Any]) -> None:
    for errors, sites in pool2.run(run, options, timeout=380):
        assert {("forward", "all_gather_matmul"), ("forward", "matmul_reduce_scatter")} <= sites
        assert {("backward", "all_gather_matmul"), ("backward", "matmul_reduce_scatter")} <= sites
        assert options or ("forward", "matmul_all_reduce") in sites
        assert all(e < (0.2 if options else 0.02) for e in errors.values()), errors


def test_list_of_dtypes() -> None:
    """A traced call holds integers for dtypes, for which torch 2.11's wrapper has no code."""
    library = torch.library.Library("ub_overlap_tests", "FRAGMENT")
    ops = torch.ops.ub_overlap_tests

    def nested(x: Tensor, dtypes: list[Any]) -> tuple[Tensor, list[Tensor]]:
        return x + 1, [(x * 2).to(dtype) for dtype in compat.dtypes(dtypes)]

    def flat(x: Tensor, dtypes: list[Any]) -> list[Tensor]:
        first, rest = nested(x, dtypes)
        return [first, *rest]

    for kernel, results in ((nested, "(Tensor, Tensor[])"), (flat, "Tensor[]")):
        library.define(f"{kernel.__name__}(Tensor x, ScalarType[] dtypes) -> {results}")
        library.impl(kernel.__name__, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ub_overlap_tests::{kernel.__name__}", kernel, lib=library)
    use_flat_results(ops.nested.default, ops.flat.default)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        first, rest = ops.nested(x.relu(), [torch.float32, torch.bfloat16])
        return (first, *rest)

    x = torch.randn(4, 4)
    with uncached():
        found = torch.compile(function, options={"cpp_wrapper": True})(x)
    for a, b in zip(found, function(x), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
