"""A checkpointed region with all_to_alls: backward repeats the exchange of rows alone, and the results are those without it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.expert_parallel.model import ROUTINGS, SIZES, RoutedExperts, make_routes
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER, full_but
from ub_overlap.compiler.reports.history import HISTORY

EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
HOST_READ = torch.ops.aten._local_scalar_dense.default


def repeat_exchanges(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A user's policy that names exchanges, and what the host reads."""
    return CheckpointPolicy.MUST_RECOMPUTE if op in (EXCHANGE, HOST_READ) else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS: dict[str, Any] = {
    "plain": {},
    "by policy": {"context_fn": partial(create_selective_checkpoint_contexts, repeat_exchanges)},
}


def run_experts(rank: int, world: int, routing: str, inner: str, overlap: str, contexts: str) -> dict[str, Any]:
    """Return the types of backward's exchanges by rank, and errors of the step against the same one without a checkpoint."""
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    torch.manual_seed(rank)
    experts = RoutedExperts(SIZES["tiny"], 2, dist.group.WORLD).bfloat16()
    chosen, scores = make_routes(32, 2 * world, 2, routing, rank)
    x = torch.randn(32, 32, dtype=torch.bfloat16).requires_grad_()

    def whole(x: Tensor) -> Tensor:
        return experts(x, chosen, scores) * 2

    def again(x: Tensor) -> Tensor:
        body = partial(experts, chosen=chosen, scores=scores)
        return checkpoint(body, x, use_reentrant=False, **CONTEXTS[contexts]) * 2

    found: dict[str, Any] = {}
    results = []
    for name, step in (("whole", whole), ("again", again)):
        for leaf in (x, *experts.parameters()):
            leaf.grad = None
        mark = HISTORY.mark()
        options = {"inner": inner, "overlap": overlap}
        out = torch.compile(step, backend="ub_overlap", options=options, fullgraph=True)(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in experts.parameters())])
        decisions = [d for plan in HISTORY.since(mark) for d in plan.decisions if d.phase == "backward"]
        found[name] = sorted(d.dtype for d in decisions if d.kind.value == "all_to_all")
    found["error"] = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(*results, strict=True))
    return found


@pytest.mark.parametrize("routing", full_but(["balanced"], ROUTINGS))
@pytest.mark.parametrize("inner", INNER)
def test_backward_repeats_one_exchange_of_rows(pool2: RankPool, routing: str, inner: str) -> None:
    for found in pool2.run(run_experts, routing, inner, "force", "plain"):
        assert found["whole"] == ["bfloat16"] * 2
        assert found["again"] == ["bfloat16"] * 3, "tokens are sent again; counts and results are not"
        assert found["error"] <= (0 if inner == "aot_eager" else 1e-2), found  # Inductor fuses other casts


def sum_on_the_host(rank: int, world: int) -> tuple[list[str], float]:
    """The host adds up the counts of experts. Return the types of backward's exchanges, and the error against eager code."""
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    counts = torch.tensor([[1, 2], [3, 0]] if rank == 0 else [[0, 2], [1, 4]])
    x = torch.randn(int(counts.sum()), 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()

    def layer(rows: Tensor) -> Tensor:
        with torch.no_grad():
            received = funcol.all_to_all_single(counts, None, None, dist.group.WORLD)
        sent, got = ([first + second for first, second in part.tolist()] for part in (counts, received))
        return funcol.all_to_all_single_autograd(rows.sin(), got, sent, dist.group.WORLD).exp()

    def step(rows: Tensor) -> Tensor:
        return checkpoint(layer, rows, use_reentrant=False) * 2

    mark = HISTORY.mark()
    options = {"inner": "aot_eager", "overlap": "force"}
    torch.compile(step, backend="ub_overlap", options=options, fullgraph=True)(x).square().sum().backward()
    found, x.grad = x.grad, None
    step(x).square().sum().backward()
    decisions = [d for plan in HISTORY.since(mark) for d in plan.decisions if d.phase == "backward"]
    return sorted(d.dtype for d in decisions), float((found - x.grad).abs().max())


def test_counts_that_the_host_adds_up(pool2: RankPool) -> None:
    for dtypes, error in pool2.run(sum_on_the_host):
        assert dtypes == ["float32"] * 2 and error == 0


def uneven_integers(rank: int, world: int, kept: list[int]) -> tuple[list[str], float]:
    """Exchange integers in uneven parts in a checkpointed region: `kept`, by rank, from each. As `sum_on_the_host`."""
    torch._dynamo.reset()
    sent = torch.arange(sum(kept)) + rank
    x = torch.randn(kept[rank] * world, generator=torch.Generator().manual_seed(rank)).requires_grad_()

    def layer(rows: Tensor) -> Tensor:
        with torch.no_grad():
            received = funcol.all_to_all_single(sent, [kept[rank]] * world, kept, dist.group.WORLD)
        return (rows * received).sin()

    def step(rows: Tensor) -> Tensor:
        return checkpoint(layer, rows, use_reentrant=False) * 2

    mark = HISTORY.mark()
    torch.compile(step, backend="ub_overlap", options={"inner": "aot_eager"}, fullgraph=True)(x).sum().backward()
    found, x.grad = x.grad, None
    step(x).sum().backward()
    decisions = [d for plan in HISTORY.since(mark) for d in plan.decisions if d.phase == "backward"]
    return sorted(d.dtype for d in decisions), float((found - x.grad).abs().max())


def test_uneven_integers_are_exchanged_again(pool2: RankPool) -> None:
    """One rank receives less than MAX_KEPT_BYTES, the other more: both repeat the exchange, or one would wait."""
    for dtypes, error in pool2.run(uneven_integers, [3500, 4500]):
        assert dtypes == ["int64"] and error == 0


@pytest.mark.tier("full")
def test_without_overlap_the_program_stays(pool2: RankPool) -> None:
    for found in pool2.run(run_experts, "balanced", "aot_eager", "off", "plain"):
        assert found["again"] == ["bfloat16"] * 4 + ["int64"] and found["error"] == 0


@pytest.mark.tier("full")
def test_a_policy_of_the_user_stays(pool2: RankPool) -> None:
    """The counts are exchanged again where a policy says so. The size of a result needs no exchange anyway."""
    for found in pool2.run(run_experts, "skewed", "aot_eager", "force", "by policy"):
        assert found["again"] == ["bfloat16"] * 3 + ["int64"] and found["error"] == 0, found
