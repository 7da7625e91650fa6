"""Gathered tensors that are scaled: constants move to the shard, with the same bits, and what looks alike stays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compiler.one_rank import OneRank
from tests.compiler.rank_compile import FUSED, decisions_of, world_name
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from ub_overlap.compiler.joint.joint_decision import joint_decision
from ub_overlap.compiler.joint.scale_shards import may_scale_shards, scale_shards
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.reasons import Reason

Function = Callable[[Tensor, Tensor], Any]
ROWS, WIDTH, COLS = 6, 8, 4
c10d = torch.ops._c10d_functional


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, dim, world_name())


def multiplied(x: Tensor, w: Tensor) -> Tensor:
    return (gather(x) * 0.3) @ w


def divided(x: Tensor, w: Tensor) -> Tensor:
    return (gather(x) / 3) @ w


def negated(x: Tensor, w: Tensor) -> Tensor:
    return -gather(x) @ w


def through_views(x: Tensor, w: Tensor) -> Tensor:
    return (gather(x).view(-1, 2, WIDTH) * 0.3).view(-1, WIDTH) @ w


def one_after_another(x: Tensor, w: Tensor) -> Tensor:
    return -(gather(x).view(-1, 1, WIDTH) * 0.3).view(-1, WIDTH).div(7) @ w


def transposed(x: Tensor, w: Tensor) -> Tensor:
    """As the right operand of a matmul."""
    return w.t() @ (gather(x).t() * 0.3)


def along_dim_1(x: Tensor, w: Tensor) -> Tensor:
    return (gather(x.view(2, -1, WIDTH), 1) * 0.3).flatten(0, 1) @ w


def read_alike(x: Tensor, w: Tensor) -> Tensor:
    """Two linears, each of which scales its input."""
    gathered = gather(x)
    return (gathered * 0.3) @ w + ((gathered * 0.3) @ w).sin()


def narrowed(x: Tensor, w: Tensor) -> Tensor:
    return (gather(x).to(torch.bfloat16) * 0.3) @ w.to(torch.bfloat16)


def negated_sum(x: Tensor, w: Tensor) -> Tensor:
    """Reductions follow the same scalings."""
    return funcol.reduce_scatter_tensor_autograd(-(x @ w), "sum", 0, world_name())


def divided_sum(x: Tensor, w: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor_autograd((x @ w) / 3, "sum", 0, world_name())


SUMS: list[Function] = [negated_sum, divided_sum]
MOVED: list[Function] = [
    multiplied, divided, negated, through_views, one_after_another, transposed, along_dim_1, read_alike, narrowed,
]  # fmt: skip


def scaled_by_rows(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.arange(ROWS * 2, dtype=x.dtype).unsqueeze(1)
    return (gather(x) * rows) @ w


def scaled_by_tensor(x: Tensor, w: Tensor) -> Tensor:
    """Ranks may hold other numbers."""
    return (gather(x) * w[0, 0]) @ w


def scaled_in_place(x: Tensor, w: Tensor) -> Tensor:
    gathered = gather(x)
    first = gathered.sin()
    return gathered.detach().mul_(0.3) @ w + first @ w


def shifted(x: Tensor, w: Tensor) -> Tensor:
    return (gather(x) + 0.3) @ w


def divided_to_integers(x: Tensor, w: Tensor) -> Tensor:
    return torch.div(gather(x), 3, rounding_mode="floor") @ w


def divided_by_zero(x: Tensor, w: Tensor) -> Tensor:
    return (gather(x) / 0) @ w


def read_otherwise(x: Tensor, w: Tensor) -> Tensor:
    gathered = gather(x)
    return (gathered * 0.3) @ w + gathered[:, :COLS].sin()


def scaled_otherwise(x: Tensor, w: Tensor) -> Tensor:
    gathered = gather(x)
    return (gathered * 0.3) @ w + (gathered * 0.7) @ w


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    gathered = gather(x)
    return (gathered * 0.3) @ w, gathered


def rounded(x: Tensor, w: Tensor) -> Tensor:
    return (gather(x).to(torch.int32) * 2).to(x.dtype) @ w


def rounded_before(x: Tensor, w: Tensor) -> Tensor:
    """Scaled in the type that is gathered, after a cast that rounds."""
    return (gather(x).to(torch.bfloat16).float() * 0.3) @ w


def widened(x: Tensor, w: Tensor) -> Tensor:
    """The shard is in bf16. Scaled in fp32, it would be sent so."""
    return (gather(x.to(torch.bfloat16)).float() * 0.3) @ w


def of_padded(x: Tensor, w: Tensor) -> Tensor:
    return (torch.nn.functional.pad(gather(x), [0, 0, 0, 2]) * 0.3) @ w


LEFT: dict[Function, Reason] = {
    scaled_by_rows: Reason.NON_LINEAR,
    scaled_by_tensor: Reason.NON_LINEAR,
    shifted: Reason.NON_LINEAR,
    divided_to_integers: Reason.NON_LINEAR,
    divided_by_zero: Reason.NON_LINEAR,
    read_otherwise: Reason.NON_LINEAR,
    scaled_otherwise: Reason.NON_LINEAR,
    returned: Reason.NON_LINEAR,
    widened: Reason.CAST_IN_BETWEEN,
}


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    if "pool2" in request.fixturenames:
        yield
        return
    with FakeRanks(2).group():
        yield


def traced(function: Function) -> GraphModule:
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(torch.randn(ROWS, WIDTH), torch.randn(WIDTH, COLS))


def outputs(module: GraphModule) -> Any:
    made = torch.Generator().manual_seed(0)
    return OneRank(module).run(torch.randn(ROWS, WIDTH, generator=made), torch.randn(WIDTH, COLS, generator=made))


class AllRanks(OneRank):
    """Ranks with equal shards: stand-ins that scale shards would round otherwise."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is c10d.all_gather_into_tensor.default:
            return torch.cat([args[0]] * args[1])
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("function", MOVED, ids=lambda f: f.__name__)
def test_the_shard_is_scaled_with_the_same_bits(function: Function) -> None:
    module = traced(function)
    inputs = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, COLS)
    changed = copy.deepcopy(module)
    assert may_scale_shards(changed.graph) and scale_shards(changed.graph) == 1 and not may_scale_shards(changed.graph)
    changed.graph.lint()
    changed.recompile()
    assert torch.equal(AllRanks(module).run(*inputs), AllRanks(changed).run(*inputs))
    (gathered,) = changed.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    assert "of the shard before it is gathered" in joint_decision(gathered).change_note
    for node in changed.graph.nodes:  # values are those that the changed graph computes
        assert node.op == "output" or "val" in node.meta
    assert all(gathered.meta["val"].dtype == user.meta["val"].dtype for user in gathered.users)


@pytest.mark.parametrize("function", [*LEFT, scaled_in_place, rounded, rounded_before, of_padded], ids=lambda f: f.__name__)
def test_what_looks_alike_stays(function: Function) -> None:
    graph = traced(function).graph
    before = str(graph)
    assert not may_scale_shards(graph) and scale_shards(graph) == 0
    assert str(graph) == before


def decided(function: Function) -> Decision:
    with torch.no_grad():
        return decisions_of(function, (torch.randn(ROWS, WIDTH), torch.randn(WIDTH, COLS)), FUSED)[0]


@pytest.mark.parametrize("function", [*MOVED, *SUMS], ids=lambda f: f.__name__)
def test_the_collective_is_overlapped(function: Function) -> None:
    decision = decided(function)
    assert decision.strategy.mode.value == "pipelined", decision
    assert ("before it is gathered" in decision.detail) == (function in MOVED)


@pytest.mark.parametrize(("function", "reason"), LEFT.items(), ids=lambda f: getattr(f, "__name__", ""))
def test_reasons_of_what_stays(function: Function, reason: Reason) -> None:
    decision = decided(function)
    assert decision.reason is reason, decision


def errors(rank: int, world: int, name: str) -> list[tuple[float, float, float]]:
    """Return the errors of (eager, our rewritten graph, our graph without overlap) against fp64: result and gradients."""
    function = globals()[name]
    made = torch.Generator().manual_seed(rank)
    x, w = torch.randn(ROWS, WIDTH, generator=made), torch.randn(WIDTH, COLS, generator=torch.Generator().manual_seed(9))
    results = []
    for dtype, options in (
        (torch.float64, None),
        (torch.float32, None),
        (torch.float32, FUSED),
        (torch.float32, {"overlap": "off"}),
    ):
        torch._dynamo.reset()
        a, b = (t.to(dtype, copy=True).requires_grad_() for t in (x, w))
        run = function
        if options is not None:
            run = torch.compile(function, backend="ub_overlap", options={**options, "inner": "aot_eager"})
        y = run(a, b)
        y.float().square().sum().backward()
        results.append([t.detach().double() for t in (y, a.grad, b.grad)])
    reference = results[0]
    return [tuple(float((r[i] - t).abs().max() / t.abs().max()) for r in results[1:]) for i, t in enumerate(reference)]  # type: ignore[misc]


SHORT = [one_after_another, along_dim_1, transposed, divided_sum]


@pytest.mark.parametrize(
    "function", full_but(SHORT, [*(f for f in MOVED if f is not narrowed), *SUMS]), ids=lambda f: f.__name__
)
def test_numbers(pool2: RankPool, function: Function) -> None:
    for found in pool2.run(errors, function.__name__):
        for eager, ours, plain in found:
            assert ours <= 2 * max(eager, plain) + 1e-6, found
