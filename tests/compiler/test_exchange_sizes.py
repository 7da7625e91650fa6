"""A checkpointed region with all_to_alls: backward repeats the exchange of rows alone, and the results are those without it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.expert_parallel.model import ROUTINGS, SIZES, RoutedExperts, make_routes
from tests.harness.ranks import RankPool
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


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_backward_repeats_one_exchange_of_rows(pool2: RankPool, routing: str, inner: str) -> None:
    for found in pool2.run(run_experts, routing, inner, "force", "plain"):
        assert found["whole"] == ["bfloat16"] * 2
        assert found["again"] == ["bfloat16"] * 3, "tokens are sent again; counts and results are not"
        assert found["error"] <= (0 if inner == "aot_eager" else 1e-2), found  # Inductor fuses other casts


def test_without_overlap_the_program_stays(pool2: RankPool) -> None:
    for found in pool2.run(run_experts, "balanced", "aot_eager", "off", "plain"):
        assert found["again"] == ["bfloat16"] * 4 + ["int64"] and found["error"] == 0


def test_a_policy_of_the_user_stays(pool2: RankPool) -> None:
    """The counts are exchanged again where a policy says so. The size of a result needs no exchange anyway."""
    for found in pool2.run(run_experts, "skewed", "aot_eager", "force", "by policy"):
        assert found["again"] == ["bfloat16"] * 3 + ["int64"] and found["error"] == 0, found
