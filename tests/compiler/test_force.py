"""overlap="force": every collective that may be split, bulk or fused is, and what is left alone has a reason of legality."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.compiler.rank_compile import FORCE
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from tests.models.compare import decide_sites, uncached
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.reports.history import HISTORY

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3": ("tests.models.zero3", {}),
    "experts": ("tests.models.moe", {}),
    "llama_loss": ("tests.models.dtensor_llama", {"head": "loss"}),
    "llama_reduce": ("tests.models.dtensor_llama", {"sequence": False}),
}
ILLEGAL = {
    Reason.COLLECTIVE_UNSUPPORTED, Reason.DTYPE_UNSUPPORTED, Reason.REDUCE_OP_UNSUPPORTED, Reason.SCALES, Reason.TRIVIAL_GROUP,
    Reason.GROUP_NOT_STATIC, Reason.STRATEGY_ILLEGAL,
}  # fmt: skip


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", full_but(["zero3", "experts"], MODELS))
def test_models(fake2: FakeRanks, name: str) -> None:
    decisions = fake2.run(decide_sites, *MODELS[name], FORCE)[0].decisions
    left = [d for d in decisions if d["strategy"] == "none"]
    assert len(decisions) > len(left)
    assert {Reason(d["reason"]) for d in left} <= ILLEGAL, left


@pytest.mark.tier("test")
def test_across_hosts() -> None:
    """No matmul is fused over a network, so all is split: ZeRO-3 needs no override there either."""
    decisions = FakeRanks(2, hosts="1").run(decide_sites, *MODELS["zero3"], FORCE)[0].decisions
    assert {d["strategy"] for d in decisions} == {"split"}


def of_an_input(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD) @ w


def behind_an_activation(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor((x @ w).relu(), 0, dist.group.WORLD).tanh()


def exchanged(x: Tensor, w: Tensor) -> Tensor:
    """Heads for parts of the sequence, as Ulysses has them."""
    return funcol.all_to_all_single(x.relu(), None, None, dist.group.WORLD) @ w


def scattered(x: Tensor, w: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x.exp(), "avg", 0, dist.group.WORLD) @ w


def one_number(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) / funcol.all_reduce(x.abs().sum(), "sum", dist.group.WORLD)


def largest(x: Tensor, w: Tensor) -> Tensor:
    """A look-alike: no sum."""
    return x @ w / funcol.all_reduce(x.abs().amax(), "max", dist.group.WORLD)


FUNCTIONS = {f.__name__: f for f in (of_an_input, behind_an_activation, exchanged, scattered, one_number, largest)}


def strategies(_rank: int, _world: int, options: dict[str, Any]) -> dict[str, str]:
    """Return the strategy of each function's collective; where ranks exist, results are eager's."""
    found = {}
    for name, function in FUNCTIONS.items():
        torch.compiler.reset()
        x, w = torch.randn(8, 16), torch.randn(16, 16)
        mark = HISTORY.mark()
        with uncached(), torch.no_grad():
            out = torch.compile(function, backend="ub_overlap", options=options)(x, w)
        if dist.get_backend() != "fake":
            torch.testing.assert_close(out, function(x, w))
        ((decision,),) = [plan.decisions for plan in HISTORY.since(mark)]
        found[name] = str(decision.strategy)
    return found


EXPECTED = {**dict.fromkeys(FUNCTIONS, "split"), "largest": "none"}


def test_functions(pool2: RankPool) -> None:
    found = pool2.run(strategies, FORCE)
    assert found == [EXPECTED | {"one_number": found[0]["one_number"]}] * 2
    assert found[0]["one_number"] != "none"  # bulk, concurrent with the product


@pytest.mark.tier("test")
def test_split_is_off(fake2: FakeRanks) -> None:
    (found,) = fake2.run(strategies, {**FORCE, "split": "off"})
    assert "split" not in found.values()
