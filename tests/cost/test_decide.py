"""Tests of strategy selection in the compiler: choices, messages, and the check that all ranks use one profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.compiler.dags import Dag
from tests.compiler.rank_compile import decisions_of, plans_of, world_name
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.cost.predict import predict
from ub_overlap.compiler.cost.site_sizes import shape_at
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.compiler.select.decide import decide
from ub_overlap.runtime import settings
from ub_overlap.runtime.errors import PlanMismatchError

AUTO: dict[str, Any] = {"overlap": "auto", "inner": "aot_eager", "min_bytes": 0}


def gather_mm(rows: int, cols: int, wide: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    name = world_name()
    inputs = (torch.zeros(rows, cols, dtype=torch.bfloat16), torch.zeros(cols, wide, dtype=torch.bfloat16))
    return (lambda x, w: funcol.all_gather_tensor(x, 0, name) @ w), inputs


def decided(rank: int, world: int, options: dict[str, Any], sizes: tuple[int, int, int], dynamic: bool | None) -> list[Plan]:
    function, inputs = gather_mm(*sizes)
    with torch.no_grad():
        return plans_of(function, inputs, options, dynamic)


@pytest.mark.tier("test")
@pytest.mark.parametrize("dynamic", [None, True])
def test_auto_weighs_and_says_so(fake2: FakeRanks, dynamic: bool | None) -> None:
    """CPU ranks choose by the H200 profile and name it in the reason; dynamic shapes use the traced sizes."""
    plans = fake2.run(decided, {**AUTO, "profile": "h200"}, (512, 512, 512), dynamic)
    assert len({plan.digest for (plan,) in plans}) == 1
    for (plan,) in plans:
        (site,) = plan.decisions
        predicted = dict(site.predicted)
        assert set(predicted) >= {"none", "pipelined", "pipelined:chunks=1"} and all(us > 0 for us in predicted.values())
        assert plan.profile == str(load("h200")) and plan.profile in site.detail and "predicted us" in site.detail
        best = min(predicted, key=predicted.__getitem__)
        assert predicted[str(site.traced)] <= 1.03 * predicted[best] + 5
        assert (site.reason is Reason.NO_GAIN) == (site.strategy.mode is Mode.NONE)
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.tier("test")
def test_profile_is_part_of_the_plan(fake2: FakeRanks, tmp_path: Path) -> None:
    """Equal decisions from another profile make another plan; a plan without selection names no profile."""
    found = json.loads(load("h200").to_json())
    found["source"] = "another day"
    path = tmp_path / "other.json"
    path.write_text(json.dumps(found))
    sizes = (512, 512, 512)
    one, other, forced = (
        fake2.run(decided, options, sizes, None)[0][0]
        for options in ({**AUTO, "profile": "h200"}, {**AUTO, "profile": str(path)}, {**AUTO, "overlap": "force"})
    )
    assert one.decisions[0].strategy == other.decisions[0].strategy
    assert one.digest != other.digest
    assert forced.profile == "" and forced.decisions[0].predicted == () and str(forced.decisions[0].strategy) == "pipelined"


def forced_by_profile(rank: int, world: int) -> list[str]:
    """Return the strategies under "force": the best predicted form if a profile is given, always in the requested chunks."""
    function, inputs = gather_mm(8, 64, 64)
    force = {**AUTO, "overlap": "force", "profile": "h200"}
    with torch.no_grad():
        return [
            str(d.strategy)
            for options in (
                force,
                {**force, "overrides": {"*": "chunks=4"}},
                {**force, "overrides": {"*": "pipelined:chunks=8"}},
            )
            for d in decisions_of(function, inputs, options)
        ]


@pytest.mark.tier("test")
def test_force(fake2: FakeRanks) -> None:
    """A forced site is split to overlap, although the H200 profile prefers no overlap or one chunk."""
    for strategies in fake2.run(forced_by_profile):
        assert strategies == ["pipelined", "pipelined:chunks=4", "pipelined:chunks=8"]


def with_two_profiles(rank: int, world: int, paths: list[str]) -> str:
    """Return the error of a first call in which the ranks used different profiles."""
    name = world_name()
    function = lambda x, w: funcol.all_gather_tensor(x, 0, name) @ w  # noqa: E731
    options = {"overlap": "force", "inner": "aot_eager", "profile": paths[rank]}
    with torch.no_grad(), uncached():
        try:
            torch.compile(function, backend="ub_overlap", options=options)(torch.randn(8, 64), torch.randn(64, 48))
        except Exception as error:  # noqa: BLE001 (torch may wrap it; the text goes to the test)
            return f"{type(getattr(error, 'inner_exception', error)).__name__}: {error}"
    return ""


def test_ranks_with_different_profiles_are_told(pool2: RankPool, tmp_path: Path) -> None:
    found = json.loads(load("h200").to_json())
    paths = []
    for rank in range(2):
        found["source"] = f"rank {rank}"
        paths.append(str(tmp_path / f"{rank}.json"))
        Path(paths[-1]).write_text(json.dumps(found))
    for error in pool2.run(with_two_profiles, paths):
        assert error.startswith("PlanMismatchError")
        for path in paths:
            assert f"device profile {load(path)}" in error
    pool2.close()  # the group is poisoned; the next test creates a new one


def left_alone_by_one(rank: int, world: int) -> str:
    """Return the error of rank 0, which overlaps a site that rank 1 does not.

    Rank 0 then issues the collective in which rank 1 waits.
    """
    name, before = world_name(), settings.current().init_timeout_s
    function = lambda x, w: funcol.all_gather_tensor(x, 0, name) @ w  # noqa: E731
    options = {"overlap": "off" if rank else "force", "inner": "aot_eager"}
    x, said = torch.ones(8, 64), ""
    settings.configure(init_timeout_s=6.0)
    try:
        with torch.no_grad(), uncached():
            torch.compile(function, backend="ub_overlap", options=options)(x, torch.ones(64, 48))
    except PlanMismatchError as error:
        said = str(error)
    finally:
        settings.configure(init_timeout_s=before)
    if rank == 0:
        funcol.wait_tensor(funcol.all_gather_tensor(x, 0, name))
    return said


@pytest.mark.tier("full")
def test_a_site_that_a_rank_leaves_alone_is_named(pool2: RankPool) -> None:
    pool2.close()  # ranks that have compared this plan before do not compare it again
    said, other = pool2.run(left_alone_by_one)
    assert other == ""
    assert "rank 1 of the group compiled another plan than rank 0, and did not reach this op" in said
    assert "site id=forward.0 kind=all_gather_matmul strategy=none" in said and "strategy=pipelined" in said
    pool2.close()


@pytest.mark.parametrize(("sent", "operands"), [(torch.float32, "bfloat16"), (torch.bfloat16, "")])
def test_independent_matmuls_have_their_own_type(sent: torch.dtype, operands: str) -> None:
    """bf16 matmuls concurrent with an fp32 reduction of gradients cost what they cost in bf16."""
    d = Dag(8)
    x, w, gradient = d.input("x", 8192, 4096), d.input("primals_w", 4096, 14336), d.input("gradient", 8192, 4096)
    wide = d.call(torch.ops.prims.convert_element_type.default, gradient, sent)
    wide = d.call(torch.ops.aten.exp.default, wide)  # else the narrow gradient would be sent
    d.output(d.mm(x, w), d.scatter(wide))
    options = parse({"profile": "h200", "min_bytes": 0, "split": "off"}, frozenset())[0]
    (decision,) = decide(d.graph, options, "backward", lambda *_: None).plan.decisions
    assert str(decision.strategy) == "bulk" and decision.work is not None and decision.work.operands == operands
    shape = shape_at(decision.work, {}, exact=True)
    assert shape is not None
    alone = predict(shape, Strategy(Mode.BULK), load("h200")).matmul_us
    assert 8192 * 4096 * 14336 * 2 / alone / 1e6 > 600, "TFLOP/s of bf16"
