"""Which collectives of few tokens become one kernel without an override."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.compiler import rank_fused
from tests.compiler.test_fused import check
from tests.harness.ranks import RankPool
from ub_overlap.compiler.cost.fused_choice import choose_fused
from ub_overlap.compiler.cost.fused_curves import FORMS, without_peaks
from ub_overlap.compiler.cost.fused_time import fused_us
from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.cost.profile_lookup import load
from ub_overlap.compiler.cost.site_shape import SiteShape
from ub_overlap.compiler.plan.strategy import NONE, Mode, Strategy

MEASURED = Path(__file__).parents[2] / "docs" / "data" / "decode_h200_tp2.json"
KIB, MIB = 1 << 10, 1 << 20


def shape(size: int, ranks: int = 2, has_norm: bool = True, collective: str = "all_reduce") -> SiteShape:
    """A site of `size` bytes in rows of 8192 bf16 numbers."""
    cols = min(8192, size // 2)
    return SiteShape(f"fused_{collective}", ranks, "bfloat16", (), size // 2 // cols, cols, has_norm=has_norm)


def chosen(size: int, **where: Any) -> str:
    choice = choose_fused(shape(size, **where), load("h200"))
    return str(choice.strategy) if choice else "not measured"


def test_the_measured_curves_decide() -> None:
    strategies = {size: chosen(size) for size in (KIB, 16 * KIB, 256 * KIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB)}
    assert strategies == {
        KIB: "one_shot", 16 * KIB: "one_shot", 256 * KIB: "one_shot", 2 * MIB: "one_shot", 4 * MIB: "one_shot",
        8 * MIB: "none", 16 * MIB: "none", 64 * MIB: "not measured",
    }  # fmt: skip
    assert chosen(16 * KIB, has_norm=False) == "one_shot"


def test_never_slower_than_plain_at_a_measured_size() -> None:
    rows = json.loads(MEASURED.read_text())["rows"]
    for row in rows:
        for norm in ("", " + norm"):
            strategy = chosen(row["bytes"], has_norm=bool(norm))
            if strategy != "none":
                assert row["us"][strategy + norm] < row["us"]["nccl" + norm], row["bytes"]


def test_other_collectives_and_devices_stay_plain() -> None:
    assert chosen(16 * KIB, collective="all_gather") == chosen(16 * KIB, collective="reduce_scatter") == "not measured"
    assert choose_fused(shape(16 * KIB), load("cpu")) is None


@pytest.mark.parametrize("ranks", [4, 8])
def test_other_group_sizes_are_assumed(ranks: int) -> None:
    """As many sent bytes take as long."""
    profile = load("h200")
    found = choose_fused(shape(4 * KIB, ranks), profile)
    assert found is not None and str(found.strategy) == "one_shot"
    assert f"assumed for {ranks} ranks from measurements of 2" in found.reason
    assert f"to measure: torchrun --nproc-per-node {ranks} -m ub_overlap calibrate" in found.reason
    as_many = fused_us(profile, shape(4 * KIB), Strategy(Mode.ONE_SHOT), 4 * KIB * (ranks - 1))
    assert found.predictions["one_shot"].us == pytest.approx(as_many)
    assert chosen(2 * MIB, ranks=ranks) != "one_shot"


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB])
def test_the_plain_form_of_more_ranks_is_no_faster(size: int, collective: str) -> None:
    us = [plain_us(load("h200"), size, ranks, collective) for ranks in (2, 4, 8)]
    assert us == sorted(us)
    assert us[1] > us[0] + 3 or size > MIB or collective != "all_reduce", "below the measured sizes the difference stays"


def plain_us(profile: Profile, size: int, ranks: int, collective: str = "all_reduce") -> float:
    """Return the time of the plain form, with curves of two ranks for every collective."""
    assert profile.fused is not None
    curves = dict.fromkeys(("all_reduce", "reduce_scatter"), profile.fused.curves["all_reduce"])
    us = fused_us(replace(profile, fused=replace(profile.fused, curves=curves)), shape(size, ranks, True, collective), NONE)
    assert us is not None
    return us


def test_differences_of_large_tensors_say_nothing_about_small_ones() -> None:
    """Of 8 ranks the shipped profile has only large tensors. Without the curve of 4 ranks nothing is known of small ones."""
    profile = load("h200")
    curves = profile.collectives["all_reduce"]
    assert min(size for size, _ in curves[8]) > 8 * MIB
    only_large = replace(profile, collectives={"all_reduce": {ranks: curves[ranks] for ranks in (2, 8)}})
    assert plain_us(only_large, 16 * KIB, 8) == plain_us(profile, 16 * KIB, 2)
    assert plain_us(only_large, 12 * MIB, 8) > plain_us(profile, 12 * MIB, 2)
    unknown = replace(profile, collectives={"all_reduce": {ranks: curves[ranks] for ranks in (4, 8)}})
    assert plain_us(unknown, 16 * KIB, 8) == plain_us(profile, 16 * KIB, 2), "no plain curve of the fused group size"


ONE, TWO = ["one_shot"], ["two_shot"]


@pytest.mark.parametrize(
    ("profile", "hidden", "ranks", "expected"),
    [
        ("h200", 4096, 2, 9 * ONE),
        ("h200", 4096, 4, 6 * ONE + 3 * TWO),
        ("h200", 4096, 8, 5 * ONE + 4 * TWO),
        ("h200", 8192, 2, 9 * ONE),
        ("h200", 8192, 4, 5 * ONE + 4 * TWO),
        ("h200", 8192, 8, 4 * ONE + 4 * TWO + ["none"]),
        ("h100", 4096, 2, 9 * ONE),
        ("h100", 4096, 4, 7 * ONE + 2 * TWO),
        ("h100", 4096, 8, 6 * ONE + 3 * TWO),
        ("h100", 8192, 2, 9 * ONE),
        ("h100", 8192, 4, 6 * ONE + 3 * TWO),
        ("h100", 8192, 8, 5 * ONE + 4 * TWO),
    ],
)
def test_batches_of_a_decode_step(profile: str, hidden: int, ranks: int, expected: list[str]) -> None:
    """A larger batch takes the next form, and no batch goes back to one that a smaller batch has left.

    Of 4 ranks H100s are measured, H200s assumed from 2 ranks.
    """
    found = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        choice = choose_fused(SiteShape("fused_all_reduce", ranks, "bfloat16", (), batch, hidden, has_norm=True), load(profile))
        found.append(str(choice.strategy) if choice else "not measured")
    assert found == expected


def test_a_row_of_a_table_pays_for_eager_kernels() -> None:
    """In the op the plain form has no norm by Inductor, so one kernel wins for more bytes."""
    profile = load("h200")
    plain, in_op = (choose_fused(shape(12 * MIB), profile, in_op) for in_op in (False, True))
    assert plain is not None and in_op is not None
    assert str(plain.strategy) == "none" and str(in_op.strategy) == "two_shot"


def test_shipped_curves_are_the_stored_measurement() -> None:
    document, profile = json.loads(MEASURED.read_text()), load("h200")
    assert profile.fused is not None and document["date"] in profile.fused.source
    for form in FORMS:
        points = {row["bytes"]: row["us"][form.replace("none", "nccl")] for row in document["rows"]}
        curve = profile.fused.curves["all_reduce"][2][form]
        assert dict(curve) == pytest.approx(dict(without_peaks(points)), rel=1e-4)


def test_peaks_of_small_sizes_are_noise() -> None:
    assert without_peaks({1: 9.0, 4: 12.0, 16: 10.0, 64: 11.0}) == [(1, 9.0), (4, 10.0), (16, 10.0), (64, 11.0)]


def test_profiles_keep_the_curves() -> None:
    profile = load("h200")
    assert Profile.from_json(profile.to_json(), "text") == profile
    assert replace(profile, fused=None).digest != profile.digest


@pytest.mark.parametrize("name", ["llama", "layer", "alone"])
def test_auto_fuses_sites_below_the_threshold(pool2: RankPool, name: str) -> None:
    for found in pool2.run(rank_fused.run_auto, name, {}):
        check(found)
        assert found["strategies"] == ["one_shot"], found
        assert "one_shot saves" in found["details"][0]
        (outlook,) = found["outlooks"]
        assert outlook.decided == outlook.best == "one_shot" and outlook.gain_us > 1 and outlook.chosen.timeline
        assert f"none {outlook.none.us:.1f}, one_shot {outlook.chosen.us:.1f}" in found["details"][0]


@pytest.mark.parametrize("name", ["gathered", "scattered", "concurrent"])
def test_auto_leaves_others_plain(pool2: RankPool, name: str) -> None:
    """Of gathers and reduce_scatters an H200 has no times. A plain collective that runs concurrently costs nothing."""
    for found in pool2.run(rank_fused.run_auto, name, {}):
        check(found)
        assert found["strategies"] == ["none"], found
        assert ("runs concurrently with" in found["details"][0]) == (name == "concurrent"), found
        assert [outlook.gain_us for outlook in found["outlooks"]] == [0.0]


@pytest.mark.parametrize("name", ["gathered", "scattered"])
def test_auto_fuses_others_where_they_are_measured(pool2: RankPool, name: str) -> None:
    """The profile of an H100 has times of gathers and reduce_scatters."""
    for found in pool2.run(rank_fused.run_auto, name, {"profile": "h100"}):
        check(found)
        assert found["strategies"] == ["one_shot"], found
        assert "one_shot saves" in found["details"][0] and found["outlooks"][0].gain_us > 1


def test_the_option_turns_it_off(pool2: RankPool) -> None:
    for found in pool2.run(rank_fused.run_auto, "llama", {"few_tokens": "off"}):
        assert found["strategies"] == ["none"] and found["reasons"] == ["below_threshold"]
        assert "one kernel" not in found["details"][0]


def test_dynamic_batches_use_a_table(pool2: RankPool) -> None:
    """Rows of 64 bytes: a table from few bytes to many. A batch of 1 is a graph of its own."""
    batches = [16, 3, 512, 1]
    for found in pool2.run(rank_fused.run_batches, "llama", batches, {}):
        assert all(found["same"]), found
        table, one = found["strategies"]
        assert table.endswith("=one_shot;*=two_shot") and one == "one_shot", found
