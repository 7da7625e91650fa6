"""What one rank adds to its product before a reduction is its own business: all ranks still run the same plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.rank_compile import FORCE, INDUCTOR, world_name
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from tests.harness.traces import as_loss
from tests.models.compare import error, uncached
from tests.models.megatron import Mappings
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime.errors import PlanMismatchError

ROWS, INNER, COLS = 8, 12, 6


class RowParallel(nn.Module):
    """A row-parallel linear, then `change(product, bias)` on this rank, then the reduction."""

    def __init__(self, style: str, bias_shape: tuple[int, ...], change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.ends, self.change = Mappings(style, 0, world_name()), change
        self.weight = nn.Parameter(torch.randn(COLS, INNER))
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.ends.leave(self.change(F.linear(x, self.weight), self.bias))


Form = tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""(shape of the bias, change on rank 0, change on the other ranks)."""


def alone(y: Tensor, b: Tensor) -> Tensor:
    return y


ROW, MATRIX = (COLS,), (ROWS, COLS)
FORMS: dict[str, Form] = {
    "scalar, 0 elsewhere": (ROW, lambda y, b: y + 0.3, lambda y, b: y + 0.0),
    "scalar on one rank": (ROW, lambda y, b: 0.3 + y, alone),
    "different scalars": (ROW, lambda y, b: y - 1, lambda y, b: y + 2),
    "bias, 0 elsewhere": (ROW, lambda y, b: y + b, lambda y, b: y + 0.0),
    "bias on one rank": (ROW, lambda y, b: y + b, alone),
    "bias subtracted": (ROW, lambda y, b: y - b, alone),
    "bias with a factor": (ROW, lambda y, b: torch.add(y, b, alpha=2), alone),
    "matrix": (MATRIX, lambda y, b: y + b, alone),
    "matrix subtracted": (MATRIX, lambda y, b: y - b, lambda y, b: y + b),
    "column": ((ROWS, 1), lambda y, b: y + b, alone),
    "column of a dynamic size": (ROW, lambda y, b: y + b.sum() * torch.ones(y.shape[0], 1), lambda y, b: y + y.shape[0]),
    "column, then transposed twice": ((COLS, 1), lambda y, b: (y.t() + b).t(), alone),
    "one element": ((1,), lambda y, b: y - b, alone),
    "no dims": ((), lambda y, b: y + b, alone),
    "row, column and scalar": (ROW, lambda y, b: (y + b) + b.sum() - b[0] + torch.ones(ROWS, 1) + 0.5, alone),
}
Outcome = tuple[float, list[str], list[str]]
"""(largest error against eager, digests, strategies of the forward)."""


def train(rank: int, world: int, name: str, style: str, options: Mapping[str, Any], dynamic: bool = False) -> Outcome:
    torch._dynamo.reset()  # one code object, and a limit of versions
    shape, first, other = FORMS[name]
    torch.manual_seed(3 + rank)
    eager = RowParallel(style, shape, other if rank else first)
    ours = RowParallel(style, shape, eager.change)
    ours.load_state_dict(eager.state_dict())
    a = torch.randn(ROWS, INNER).requires_grad_()
    b = a.detach().clone().requires_grad_()
    expected = eager(a)
    as_loss(expected).backward()
    mark = HISTORY.mark()
    with uncached():
        found = torch.compile(ours, backend="ub_overlap", options=dict(options), dynamic=dynamic)(b)
        as_loss(found).backward()
    pairs = [(found, expected), (b.grad, a.grad), (ours.weight.grad, eager.weight.grad), (ours.bias.grad, eager.bias.grad)]
    plans = HISTORY.since(mark)
    forward = [str(d.strategy) for p in plans for d in p.decisions if d.phase == "forward"]
    return max(error(x, y, "value") for x, y in pairs), [p.shared_digest for p in plans], forward


def train_all(rank: int, world: int, style: str) -> dict[str, Outcome]:
    return {name: train(rank, world, name, style, FORCE) for name in FORMS}


@pytest.mark.parametrize("style", full_but(["reduce"], ["functional", "reduce"]))
def test_addends_of_one_rank(pool2: RankPool, style: str) -> None:
    """Forward and backward agree with eager; both ranks have one plan, and overlap the reduction."""
    first, other = pool2.run(train_all, style)
    for name in FORMS:
        for difference, _, forward in (first[name], other[name]):
            assert difference < 1e-5, (name, difference)
            assert forward == ["pipelined"], name
        assert first[name][1] == other[name][1], name


@pytest.mark.parametrize(
    ("name", "style", "options"),
    [("bias, 0 elsewhere", "functional", INDUCTOR), ("column of a dynamic size", "reduce", FORCE)],
)
def test_an_addend_under_inductor_and_with_dynamic_sizes(
    pool2: RankPool, name: str, style: str, options: dict[str, Any]
) -> None:
    first, other = pool2.run(train, name, style, options, dynamic=style == "reduce")
    assert first[1] == other[1] and first[2] == other[2] == ["pipelined"]
    assert max(first[0], other[0]) < 1e-5


def independent(rank: int, world: int) -> tuple[float, list[str], list[str]]:
    """Run a gather concurrently with a linear that has a bias on rank 0 only."""
    torch.manual_seed(7 + rank)
    x, w, b, u = torch.randn(ROWS, INNER), torch.randn(COLS, INNER), torch.randn(COLS), torch.randn(4, 5)
    group = world_name()

    def function(x: Tensor, w: Tensor, b: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(funcol.all_gather_tensor(u, 0, group)), F.linear(x, w, None if rank else b)

    expected, mark = function(x, w, b, u), HISTORY.mark()
    with torch.no_grad(), uncached():
        found = torch.compile(function, backend="ub_overlap", options=FORCE)(x, w, b, u)
    plans = HISTORY.since(mark)
    difference = max(error(p, q, "value") for p, q in zip(found, expected, strict=True))
    return difference, [p.shared_digest for p in plans], [str(d.strategy) for p in plans for d in p.decisions]


def test_a_bias_of_one_rank_beside_a_gather(pool2: RankPool) -> None:
    """A matmul with a bias is as independent as one without: the choice is the same on all ranks."""
    first, other = pool2.run(independent)
    assert first[1] == other[1] and first[2] == other[2] == ["bulk"]
    assert max(first[0], other[0]) < 1e-5


def scale(rank: int, world: int, as_tensor: bool) -> str:
    """Return the error of a constant factor that differs between ranks; "" if the results are right."""
    factor: Any = 2.0 - rank
    if as_tensor:
        factor = torch.tensor(factor)
    group = str(dist.new_group().group_name)  # its own: an error breaks it, and no rank has verified a plan on it

    def function(x: Tensor, w: Tensor, factor: Any) -> Tensor:
        return funcol.all_reduce((x @ w) * factor, "sum", group)

    x, w = torch.randn(ROWS, INNER), torch.randn(INNER, COLS)
    expected = function(x, w, factor)
    try:
        with torch.no_grad(), uncached():
            found = torch.compile(function, backend="ub_overlap", options=FORCE)(x, w, factor)
    except PlanMismatchError as failure:
        return str(failure)
    assert error(found, expected, "value") < 1e-5
    return ""


def scale_by_one(rank: int, world: int) -> tuple[float, list[str], list[str]]:
    """Multiply by 1.0 on rank 0 only, in bfloat16."""
    torch.manual_seed(9 + rank)
    x, w = torch.randn(ROWS, INNER, dtype=torch.bfloat16), torch.randn(INNER, COLS, dtype=torch.bfloat16)
    group = world_name()

    def function(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_reduce(x @ w if rank else (x @ w) * 1.0, "sum", group)

    expected, mark = function(x, w), HISTORY.mark()
    with torch.no_grad(), uncached():
        found = torch.compile(function, backend="ub_overlap", options=FORCE)(x, w)
    plans = HISTORY.since(mark)
    difference = error(found, expected, "value")
    return difference, [p.shared_digest for p in plans], [str(d.strategy) for p in plans for d in p.decisions]


def test_a_factor_of_one_on_one_rank(pool2: RankPool) -> None:
    """A factor of 1 does nothing, also not to the type of the op's output, which all ranks must share."""
    first, other = pool2.run(scale_by_one)
    assert first[1] == other[1] and first[2] == other[2] == ["pipelined"]
    assert max(first[0], other[0]) < 1e-2


def test_a_constant_factor_of_one_rank_is_an_error(pool2: RankPool) -> None:
    """A constant factor is applied to the sum of all ranks, so it must be the same; a tensor may differ."""
    assert pool2.run(scale, True) == ["", ""]
    for text in pool2.run(scale, False):
        assert "compiled another plan" in text and "scale=2.0" in text and "scale=1.0" in text
        assert "multiply by the same constant on all ranks" in text
