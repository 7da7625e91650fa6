"""Graphs that resemble a site but differ: coinciding dims, columns in place of rows, casts that round.

Each case is compared with eager on three ranks. If it must not be rewritten, the reason is asserted too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as F

from tests.compiler.rank_compile import FORCE, world_name
from tests.compiler.test_fuzz import values
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.reports.history import HISTORY

c10d = torch.ops._c10d_functional
R = 3
Function = Callable[..., Tensor | tuple[Tensor, ...]]
Case = tuple[Function, tuple[tuple[int, ...], ...], Reason | None]


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.all_gather_tensor_autograd(x.contiguous(), dim, world_name())


def scatter(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.reduce_scatter_tensor_autograd(x.contiguous(), "sum", dim, world_name())


def overwritten(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    g = gather(x).clone()
    g.copy_(y)
    return g @ w


def two_casts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = gather(x * 0.3)
    return g.bfloat16() @ w.bfloat16(), g.half() * 2


def viewed_product(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    return scatter(y.t().contiguous()), y.view(-1) * 2


def viewed_transpose(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = gather(x).t().contiguous()
    return g @ w, g.view(-1) * 2, g


def saved_gather(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Selective checkpointing saves the collective's node itself, and backward waits for it."""
    raw = c10d.all_gather_into_tensor(x, R, world_name())
    return c10d.wait_tensor(raw) @ w, raw


def saved_scatter(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    raw = c10d.reduce_scatter_tensor(x @ w, "sum", R, world_name())
    return c10d.wait_tensor(raw), raw


def dropouts(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The second matmul depends on random numbers drawn after those for the first matmul's result."""
    g = gather(x)
    first = F.dropout(g @ w, 0.5)
    return first, g @ F.dropout(v, 0.5)


N = 2 * R
CASES: dict[str, Case] = {
    "column on a square": (lambda x, w, c: scatter(x @ w + c), ((N, 5), (5, N), (N, 1)), None),
    "bias, then a transposed square": (
        lambda x, w, b: scatter(F.linear(x, w, b).t()), ((N, 5), (N, 5), (N,)), None,
    ),
    "row, then a transposed square": (lambda x, w, b: scatter((x @ w + b).t()), ((N, 5), (5, N), (N,)), None),
    "batch of which every row is added": (
        lambda x, w, a: scatter((a + x @ w).view(-1, 3)), ((4, 5), (5, 3), (N, 4, 3)), Reason.BROADCAST_SUM,
    ),
    "bias of one column": (lambda x, w, b: scatter(F.linear(x, w, b)), ((N, 5), (1, 5), (1,)), None),
    "transposed summand of another shape": (
        lambda x, w, a: scatter((x @ w).view(N, 6) + a.t()), ((4 * R, 5), (5, 3), (6, N)), None,
    ),
    "reshaped before it is transposed": (
        lambda x, w, a: scatter(((x @ w).view(4, N) + a).t()), ((8, 5), (5, R), (4, N)), Reason.NON_LINEAR,
    ),
    "batch of columns, permuted": (
        lambda x, w: scatter(torch.bmm(x, w.expand(4, 5, 1)).permute(1, 0, 2).contiguous()),
        ((4, N, 5), (1, 5, 1)), Reason.LAYOUT,
    ),
    "weight repeated in the middle": (
        lambda x, w: torch.bmm(gather(x, 1), w.view(4, 1, 3).expand(4, 4, 3)), ((4, 2, 4), (4, 3)), Reason.LAYOUT,
    ),
    "multiplied with a copy of itself": (lambda x: (g := gather(x)) @ g.t().clone(), ((2, 5),), Reason.DEPENDENT_OPERAND),
    "overwritten": (overwritten, ((2, 5), (N, 5), (5, 3)), Reason.NON_LINEAR),
    "rounded on the way": (lambda x, w: gather(x * 0.3).bfloat16().float() @ w, ((2, 16), (16, 8)), Reason.CAST_IN_BETWEEN),
    "quantized on the way": (
        lambda x, w: gather(x * 0.3).to(torch.float8_e4m3fn).float() @ w, ((2, 16), (16, 8)), Reason.CAST_IN_BETWEEN,
    ),
    "two casts": (two_casts, ((2, 16), (16, 8)), Reason.CAST_IN_BETWEEN),
    "wider summand": (
        lambda x, w, a: scatter(x.bfloat16() @ w.bfloat16() + a * 300.7), ((N, 16), (16, 8), (N, 8)), Reason.CAST_IN_BETWEEN,
    ),
    "scaled into range": (lambda x, w: scatter((x.half() * 25.0) @ (w.half() * 25.0) / 1024).float(), ((N, 16), (16, 8)), None),
    "product viewed elsewhere": (viewed_product, ((4, 5), (5, N)), None),
    "transpose viewed elsewhere": (viewed_transpose, ((2, 5), (N, 3)), None),
    "gather saved": (saved_gather, ((2, 5), (5, 3)), None),
    "scatter saved": (saved_scatter, ((N, 5), (5, 3)), None),
    "random order": (dropouts, ((2, 5), (5, 3), (5, 3)), None),
}  # fmt: skip
WITHOUT_GRADIENT = {"overwritten", "gather saved", "scatter saved"}
FUSED = {"random order": ["mm"]}
"""The matmuls that are fused, of cases where not all may be."""


def run(rank: int, world: int, name: str, options: dict[str, Any]) -> tuple[list[float], list[str], list[str]]:
    """Return the largest differences from eager, the forward's reason ("" if pipelined), and the matmuls that are fused."""
    function, shapes, _ = CASES[name]
    values_of = torch.Generator().manual_seed(rank)
    inputs = [torch.randint(1, 4, s, generator=values_of).float() for s in shapes]
    grad = name not in WITHOUT_GRADIENT

    def both(f: Function) -> list[Tensor | None]:
        torch.manual_seed(7)
        return values(lambda *t: o if isinstance(o := f(*t), tuple) else (o,), inputs, grad)

    truth, mark = both(function), HISTORY.mark()
    with uncached():
        found = both(torch.compile(function, backend="ub_overlap", options=options))
    first = HISTORY.since(mark)[0].decisions[0]
    why = first.reason.value if first.reason else first.detail.removeprefix("not pipelined: ").partition(":")[0]
    gaps = [0.0]
    for a, b in zip(truth, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape and a.isfinite().all()
            gaps.append(((a.float() - b.float()).abs().max() / a.float().abs().max().clamp(min=1)).item())
    return gaps, [why], list(first.matmuls)


@pytest.mark.parametrize("name", CASES)
def test_case(pool3: RankPool, name: str) -> None:
    for gaps, why, fused in pool3.run(run, name, FORCE):
        assert max(gaps) < (1e-3 if name == "scaled into range" else 2e-6), gaps
        assert why == [CASES[name][2].value if CASES[name][2] else ""]  # type: ignore[union-attr]
        assert fused == FUSED.get(name, fused)


def uneven(rank: int, world: int) -> bool:
    """Compare with eager: one site is disabled and has a weight with fewer columns on the last ranks."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return gather(x) @ w, gather(x * 2) @ v

    inputs = (torch.ones(2, 5), torch.ones(5, 7 - rank), torch.ones(5, 4))
    options = {**FORCE, "overrides": {"forward.0": "none"}}
    with uncached():
        found = torch.compile(function, backend="ub_overlap", options=options)(*inputs)
    return all(torch.equal(a, b) for a, b in zip(function(*inputs), found, strict=True))


def test_uneven_ranks_may_be_left_alone(pool3: RankPool) -> None:
    assert all(pool3.run(uneven))


def unequal(rank: int, world: int) -> list[str]:
    """Compile a layer whose inner size differs by rank; return wrong tensors and sites that are not overlapped."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 16, generator=generator)
    w = torch.randn(16, 12 + 4 * rank, generator=generator)
    v = torch.randn(12 + 4 * rank, 16, generator=generator)

    def layer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return scatter(torch.relu(gather(x) @ w) @ v)

    results = []
    mark = HISTORY.mark()
    for run in (layer, torch.compile(layer, backend="ub_overlap", options=FORCE)):
        leaves = [t.clone().requires_grad_() for t in (x, w, v)]
        with uncached():
            out = run(*leaves)
            out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    wrong = [
        f"tensor {i}" for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.allclose(a, b, atol=1e-3, rtol=1e-4)
    ]
    return wrong + [d.id for p in HISTORY.since(mark) for d in p.decisions if not d.overlapped]


def test_unequal_ranks_are_overlapped(pool3: RankPool) -> None:
    assert pool3.run(unequal) == [[], [], []]
