"""Plans: text forms, JSON, and a digest that is equal on all ranks and independent of group names."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.compiler.rank_compile import plans_of
from tests.harness.ranks import RankPool
from tests.models.dtensor_llama import tensor_mesh
from ub_overlap.compiler.plan.decision import CastDecision, Decision, IndependentEstimate, SavedActivation
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind, Reason
from ub_overlap.compiler.plan.records import PLAN_VERSION
from ub_overlap.compiler.plan.strategy import NONE, Mode, Strategy
from ub_overlap.runtime import plan_store
from ub_overlap.runtime.session.plan_mismatch import find_first_difference

SITE = Decision(
    id="forward.0",
    kind=Kind.ALL_GATHER_MATMUL,
    phase="forward",
    strategy=Strategy(Mode.PIPELINED, 4),
    group="g0",
    ranks=2,
    shapes=(("input", "[8, 64]"), ("matmul0", "[16, 64] @ [64, 48]")),
    dtype="float32",
    matmuls=("mm",),
    options=("pipelined",),
    bytes=2048,
    flops=98304,
    module="layers.0.wq",
    source="model.py:7: self.wq(x)",
    kept=SavedActivation("gathered", 64, 16, 1.0),
)
LEFT = replace(SITE, id="forward.1", strategy=NONE, reason=Reason.LAYOUT, detail="rows are mixed", bytes=None, flops=None)
GONE = replace(SITE, id="forward.2.merged0", strategy=Strategy(Mode.MERGED))
PLAN = Plan("forward", (SITE, LEFT, GONE))


@pytest.mark.parametrize("text", ["none", "pipelined", "direct", "bulk", "pipelined:chunks=4", "bulk:chunks=16"])
def test_strategy_text(text: str) -> None:
    assert str(Strategy.parse(text)) == text
    assert Strategy.is_forceable(text)


@pytest.mark.parametrize(
    "text", ["", "auto", "merged", "none:chunks=2", "bulk:chunks=0", "pipelined:chunks=x", "bulk\n", "Bulk", "direct:chunks=2"]
)
def test_bad_strategy(text: str) -> None:
    assert not Strategy.is_forceable(text)
    with pytest.raises(ValueError, match="expected none, pipelined, direct, bulk"):
        Strategy.parse(text)


def test_json_round_trip() -> None:
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.digest == PLAN.digest == json.loads(PLAN.to_json())["digest"]


@pytest.mark.parametrize("version", [1, PLAN_VERSION + 1])
def test_other_version_is_refused(version: int) -> None:
    """Also with another digest, as plans of version 1 have: the error names the version, not the digest."""
    text = PLAN.to_json().replace(f'"version": {PLAN_VERSION}', f'"version": {version}').replace(PLAN.digest, "ab" * 8)
    with pytest.raises(ValueError, match=rf"field version\n.*\n  got:      {version}\n.*\n.*another version of ub_overlap"):
        Plan.from_json(text)


def test_fields_of_reports_are_not_read() -> None:
    """A cast of a stored plan has no measured error; a field that is not known does not fail."""
    content = json.loads(PLAN.to_json())
    cast = CastDecision(node="mm", role="forward", module="m", shape="[1, 2] @ [2, 3]", recipe="tensorwise")
    content["casts"] = [{**cast.to_dict(), "error": 0.5}]
    assert Plan.from_json(json.dumps(content)).casts == (cast,)


def other(**changes: object) -> str:
    return Plan("forward", (replace(SITE, **changes), LEFT, GONE)).shared_digest  # type: ignore[arg-type]


SHARED: list[tuple[dict[str, Any], str, str]] = [
    ({"strategy": Strategy(Mode.PIPELINED, 8)}, "strategy=pipelined:chunks=4", "strategy=pipelined:chunks=8"),
    ({"strategy": Strategy(Mode.BULK, 4)}, "strategy=pipelined:chunks=4", "strategy=bulk:chunks=4"),
    ({"group": "g1"}, "group=g0", "group=g1"),
    ({"ranks": 4}, "ranks=2", "ranks=4"),
    ({"dtype": "bfloat16"}, "dtype=float32", "dtype=bfloat16"),
    ({"shapes": (("input", "[4, 64]"),)}, "shapes={'input': '[8, 64]'}", "shapes={'input': '[4, 64]'}"),
    ({"module": "layers.1.wq"}, "module=layers.0.wq", "module=layers.1.wq"),
    ({"takes": ("layers.0.wq#1",)}, "takes=[]", "takes=['layers.0.wq#1']"),
    ({"kept": SavedActivation("shard", 64, 16, 1.0)}, "keeps=gathered", "keeps=shard"),
]
EXPLAINS: list[dict[str, Any]] = [
    {"matmuls": ("mm_7",)}, {"paired": ("mm_7",)}, {"source": "other.py:1: f(x)"}, {"detail": "else"}, {"bytes": 1},
    {"rows": 3}, {"kept": SavedActivation("gathered", 32, 8, 2.0)}, {"options": ("bulk",)},
    {"pairing": IndependentEstimate(1.0, 2, 3, None)},
]  # fmt: skip


def test_estimates_of_less_memory() -> None:
    """Results that are smaller than operands end the operands' life sooner."""
    text = str(IndependentEstimate(5.0, -(32 << 20), 0, 2.0))
    assert f"{32 << 20} bytes live shorter and the peak grows by 0" in text and "-" not in text


@pytest.mark.parametrize(("changes", "mine", "theirs"), SHARED, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_digest_follows_what_ranks_must_share(changes: dict[str, Any], mine: str, theirs: str) -> None:
    """A shared field changes the digest, and the error names only that field.

    Differences in explanatory fields are not named.
    """
    assert other(**changes) != PLAN.shared_digest
    both = {key: value for change in (*EXPLAINS, changes) for key, value in change.items()}
    found = find_first_difference(PLAN.to_json(), Plan("forward", (replace(SITE, **both), LEFT, GONE)).to_json())
    named = "site id=forward.0 kind=all_gather_matmul"
    if "strategy" not in changes:
        named += " strategy=pipelined:chunks=4"
    assert found == (f"{named} {mine}", f"{named} {theirs}")


def test_the_graph_is_named_whatever_is_float8() -> None:
    """The graph digest excludes collectives that float8 adds, site numbers and dtypes.

    It includes modules, groups and collectives.
    """
    scales = replace(LEFT, id="forward.0", kind=Kind.ALL_REDUCE, reason=Reason.SCALES)
    gather = replace(SITE, id="forward.1", dtype="uint8", strategy=NONE)
    quantized = Plan("forward", (scales, gather, replace(LEFT, id="forward.2"), GONE))
    assert quantized.graph == PLAN.graph and quantized.shared_digest != PLAN.shared_digest
    for changes in ({"module": "layers.1.wq"}, {"group": "g1"}, {"ranks": 4}, {"kind": Kind.MATMUL_ALL_REDUCE}):
        assert Plan("forward", (replace(SITE, **changes), LEFT, GONE)).graph != PLAN.graph


@pytest.mark.parametrize("changes", EXPLAINS, ids=str)
def test_shared_digest_leaves_out_what_only_explains(changes: dict[str, object]) -> None:
    """The own part has it, so that both plans are kept."""
    plan = Plan("forward", (replace(SITE, **changes), LEFT, GONE))  # type: ignore[arg-type]
    assert plan.shared_digest == PLAN.shared_digest and plan.digest != PLAN.digest
    assert Plan.from_json(plan.to_json()).digest == plan.digest and plan_store.is_digest(plan.digest)


def test_casts_that_differ_are_named() -> None:
    """A cast difference is named before the site differences that it causes.

    The error states the reason for a refusal. The detail of a refusal is not part of the digest.
    """
    cast = CastDecision(node="mm", role="forward", module="a.b", shape="[1, 2] @ [2, 3]", recipe="tensorwise")
    refused = replace(cast, node="mm_1", recipe="", reason=Reason.FILTERED, detail="fp8_filter refuses a.b")
    last = replace(cast, role="weight gradient")
    plans = [Plan("forward", (SITE,), casts=(cast, cast)), Plan("forward", (LEFT,), casts=(cast, refused, last))]
    assert find_first_difference(*(plan.to_json() for plan in plans)) == (
        "float8: forward matmul of 'a.b' by tensorwise",
        "float8: forward matmul of 'a.b' in 16 bits (filtered: fp8_filter refuses a.b)",
    )
    plans = [Plan("forward", (), casts=casts) for casts in ((cast,), (cast, last))]
    assert find_first_difference(*(plan.to_json() for plan in plans)) == (
        "float8: no such matmul",
        "float8: weight gradient matmul of 'a.b' by tensorwise",
    )
    assert (
        Plan("forward", (), casts=(refused,)).shared_digest
        == Plan("forward", (), casts=(replace(refused, detail="x"),)).shared_digest
    )


def test_digest_follows_phase_and_order() -> None:
    assert (
        len(
            {
                PLAN.shared_digest,
                Plan("backward", PLAN.decisions).shared_digest,
                Plan("forward", PLAN.decisions[::-1]).shared_digest,
            }
        )
        == 3
    )


def in_rows(rank: int, world: int) -> tuple[str, list[str], set[str]]:
    """Return (c10d name of this rank's group, plan digests, names of the group in the plan) on a 2D mesh."""
    name = tensor_mesh(world, True).get_group().group_name

    def function(x: Tensor, w: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor_autograd(funcol.all_gather_tensor_autograd(x, 0, name) @ w @ w.t(), "sum", 0, name)

    plans = plans_of(function, (torch.randn(4, 8, requires_grad=True), torch.randn(8, 6, requires_grad=True)))
    return name, [p.shared_digest for p in plans], {d.group for p in plans for d in p.decisions}


def test_digest_is_the_same_where_group_names_differ(pool4: RankPool) -> None:
    names, digests, groups = zip(*pool4.run(in_rows), strict=True)
    assert len(set(names)) == 2
    assert len(digests[0]) == 2
    assert all(d == digests[0] for d in digests)
    assert groups == ({"g0"},) * 4


def test_plans_of_two_versions_without_a_difference_that_can_be_told() -> None:
    from ub_overlap.runtime.session.plan_mismatch import find_first_difference

    assert find_first_difference('{"shared": {"casts": []}}', '{"shared": {}}') is None
