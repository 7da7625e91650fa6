"""Casts to float8 behind a fused collective: which become part of the op, and why others do not."""

from __future__ import annotations

import pytest

from tests.compiler import rank_fused_float8
from tests.compiler.rank_fused_float8 import FORMS
from tests.compiler.test_fused import check
from tests.harness.ranks import RankPool
from ub_overlap import _torch_compat as compat

WHOLE = "one kernel with the residual, RMSNorm and the cast to float8"
BEHIND = "the cast to float8 stays behind it: "


@pytest.mark.parametrize("name", FORMS)
def test_which_casts_are_fused(pool2: RankPool, name: str) -> None:
    why = FORMS[name][1]
    for found in pool2.run(rank_fused_float8.run_form, name, {}):
        check(found)
        (detail,) = found["details"]
        assert (WHOLE in detail) == (not why), detail
        assert "one kernel with the residual" in detail
        assert [part for part in detail.split("; ") if BEHIND in part] == ([BEHIND + why] if len(why) > 2 else []), detail


@pytest.mark.parametrize("options", [{"verify": True}, {"inner": "inductor"}])
def test_with_other_options(pool2: RankPool, options: dict[str, object]) -> None:
    for found in pool2.run(rank_fused_float8.run_form, "own_rows", options):
        check(found)
        assert WHOLE in found["details"][0], found


def test_auto_leaves_the_cast_behind(pool2: RankPool) -> None:
    """A kernel with a cast is not measured."""
    for found in pool2.run(rank_fused_float8.run_form, "own_rows", {"profile": "h200"}):
        check(found)
        assert found["strategies"] == ["one_shot"] and WHOLE not in found["details"][0], found
        assert BEHIND + "it is not measured; an override may request it" in found["details"][0], found


@pytest.mark.skipif(not compat.cpu_scales_rows(), reason="this torch has no CPU matmul with a scale per row")
def test_the_recipe_rowwise_is_fused(pool2: RankPool) -> None:
    for found in pool2.run(rank_fused_float8.run_recipe, "rowwise"):
        assert found["casts"] == 2 and found["error"] < 0.06, found
        assert len(found["details"]) == 1 and WHOLE in found["details"][0], found


def test_the_recipe_tensorwise_is_not(pool2: RankPool) -> None:
    """Its scale is the amax of all rows, which no block of rows knows."""
    for found in pool2.run(rank_fused_float8.run_recipe, "tensorwise"):
        assert found["casts"] == 2 and found["error"] < 0.06, found
        assert BEHIND + "its scale is computed from all rows of the norm" in found["details"][0], found
