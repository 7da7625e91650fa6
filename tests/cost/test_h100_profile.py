"""Tests of the shipped profile of an H100: its origin, the GPUs that use it, and the decisions that follow from it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from build_tools import h100_profile
from tests.cost.test_predict import sites
from ub_overlap.compiler.cost import SiteShape, candidates, choose, load, predict
from ub_overlap.compiler.cost.all_to_all_time import all_to_all_us
from ub_overlap.compiler.cost.direct_time import direct_us, has_direct_times
from ub_overlap.compiler.cost.fused_choice import choose_fused
from ub_overlap.compiler.cost.matmul_time import matmul_us
from ub_overlap.compiler.cost.predict import why_assumed
from ub_overlap.compiler.cost.profile_lookup import FOLDER, fallback
from ub_overlap.compiler.cost.split_time import split_times
from ub_overlap.compiler.plan.strategy import NONE
from ub_overlap.runtime import machine
from ub_overlap.tools.calibrate.fit import compare_calls

H100, H200 = load("h100"), load("h200")
CALIBRATION = h100_profile.ROOT / h100_profile.CALIBRATION
KIB, MIB = 1 << 10, 1 << 20


def stored() -> dict[str, Any]:
    return json.loads(CALIBRATION.read_text())


def test_the_file_is_created_from_the_stored_calibration() -> None:
    base = json.loads((FOLDER / "h200.json").read_text())
    of_four = json.loads((h100_profile.ROOT / h100_profile.OF_FOUR).read_text())
    text = h100_profile.as_text(h100_profile.create_profile(stored(), of_four, base))
    assert (h100_profile.PROFILES / "h100.json").read_text() == text == (FOLDER / "h100.json").read_text()
    assert h100_profile.main(["--check"]) == 0


def test_measurements_are_those_of_the_calibration() -> None:
    """Two ranks are measured on H100s, and all_to_alls and fused collectives of four. Others of 4 and 8 ranks are those of the
    H200's profile."""
    measured, of_four = load(CALIBRATION), load(h100_profile.ROOT / h100_profile.OF_FOUR)
    for name in ("key", "push", "copy", "reduce", "steps", "matmul_slowdown", "push_slowdown", "checks", "attention"):
        assert getattr(H100, name) == getattr(measured, name), name
    assert H100.compute.tflops == measured.compute.tflops and H100.key["ranks"] == 2
    assert H100.direct is not None and measured.direct is not None and H200.direct is not None
    for ranks, source in ((2, measured), (4, H200), (8, H200)):
        assert source.direct is not None
        for kind, curves in source.collectives.items():
            assert H100.collectives[kind][ranks] == curves[ranks], (kind, ranks)
        rows = [row for row in source.direct.matmuls if row[1] == ranks]
        assert {row for row in H100.direct.matmuls if row[1] == ranks} == set(rows) - outliers("direct")
    assert set(H100.matmuls) == set(measured.matmuls) - outliers("matmuls")
    assert H100.direct.link_gbs == measured.direct.link_gbs
    assert set(H100.collectives["all_to_all"]) == {2, 4}, "the H200's profile has none"
    for ranks, source in ((2, measured), (4, of_four)):
        assert H100.collectives["all_to_all"][ranks] == source.collectives["all_to_all"][ranks]
        assert H100.fused is not None and source.fused is not None
        for kind, curves in source.fused.curves.items():
            assert H100.fused.curves[kind][ranks] == curves[ranks], (kind, ranks)
    size, us = H100.reduce[-1]
    assert H100.compute.memory_gbs == pytest.approx(size / us / 1e3, rel=1e-3), "not the H200's"
    assert any("from h200" in hole for hole in H100.holes) and "h200" in H100.source and h100_profile.CALIBRATION in H100.source


def outliers(part: str) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in h100_profile.OUTLIERS[part]}


def test_outliers_are_far_from_all_others() -> None:
    """Each takes more than twice as long as predicted. No other measurement is that far off, and the source names all."""
    predicted = [(row, matmul_us(H100, row[1], row[0], *row[2:5])) for row in outliers("matmuls")]
    predicted += [(row, direct_us(H100, row[1], row[0], *row[2:5])) for row in outliers("direct")]
    assert len(predicted) == 4
    for row, us in predicted:
        assert row[-1] > 2 * us, row
        assert f"[{', '.join(map(str, row))}]" in H100.source
    for layout, dtype, m, n, k, measured_us in H100.matmuls:
        assert measured_us < 1.5 * matmul_us(H100, dtype, layout, m, n, k), (layout, dtype, m, n, k)
    assert H100.direct is not None
    for dtype, ranks, m, n, k, measured_us in H100.direct.matmuls:
        assert measured_us < 1.5 * direct_us(H100, ranks, dtype, m, n, k), (ranks, m, n, k)


def test_another_calibration_needs_its_own_outliers() -> None:
    calibration = stored()
    calibration["direct"]["matmuls"] = [row for row in calibration["direct"]["matmuls"] if row[-1] != 390.23]
    with pytest.raises(ValueError, match=r"390\.23.*revise OUTLIERS"):
        h100_profile.create_profile(calibration, calibration, json.loads(H200.to_json()))


def test_whole_calls_are_predicted() -> None:
    errors = sorted(abs(predicted / measured - 1) for _, predicted, measured in compare_calls(H100))
    assert len(errors) == 48 and errors[24] < 0.05 and errors[-1] < 0.3


@pytest.fixture
def other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine be one whose GPU is an A100."""
    monkeypatch.setattr(machine, "device", lambda: "cuda")
    monkeypatch.setattr(machine, "properties", lambda: {"name": "NVIDIA A100", "units": 108, "capability": (8, 0)})


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H800", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "analytic:NVIDIA A100"),
        ("NVIDIA A800", "analytic:NVIDIA A100"),
        ("NVIDIA H20", "analytic:NVIDIA A100"),
    ],
)
@pytest.mark.usefixtures("other_gpu")
def test_which_gpus_use_it(gpu: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ub_overlap"):
        assert fallback("cuda", gpu).name == name
    assert f"profile {name}" in caplog.text


def fused_strategies(collective: str, has_norm: bool, sizes: tuple[int, ...], ranks: int = 2) -> list[str]:
    """Return the strategy for each size in bytes, in rows of 8192 bf16 numbers."""
    strategies = []
    for size in sizes:
        cols = min(8192, size // 2)
        choice = choose_fused(
            SiteShape(f"fused_{collective}", ranks, "bfloat16", (), size // 2 // cols, cols, has_norm=has_norm), H100
        )
        strategies.append(str(choice.strategy) if choice else "not measured")
    return strategies


FEW = tuple(KIB * size for size in (4, 16, 64, 256, 1024, 2048))


def test_few_tokens() -> None:
    assert fused_strategies("all_reduce", True, FEW) == ["one_shot"] * len(FEW)
    assert fused_strategies("all_reduce", True, (8 * MIB, 16 * MIB, 64 * MIB)) == ["one_shot", "none", "not measured"]
    assert fused_strategies("all_gather", False, (*FEW, 16 * MIB)) == ["one_shot"] * (len(FEW) + 1)
    assert fused_strategies("reduce_scatter", False, (*FEW, 16 * MIB)) == ["one_shot"] * (len(FEW) + 1)
    assert fused_strategies("reduce_scatter", True, (*FEW, 16 * MIB)) == ["one_shot"] * len(FEW) + ["none"]


@pytest.mark.parametrize(("ranks", "measured"), [(3, 2), (4, 4), (8, 4)])
def test_few_tokens_of_other_group_sizes_are_assumed(ranks: int, measured: int) -> None:
    shape = SiteShape("fused_all_gather", ranks, "bfloat16", (), 8, 8192)
    choice = choose_fused(shape, H100)
    assert choice is not None
    assert (f"assumed for {ranks} ranks from measurements of {measured}" in choice.reason) == (ranks != measured)
    assert fused_strategies("all_reduce", True, (4 * KIB,), ranks) == ["one_shot"]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_sites_get_a_strategy(ranks: int) -> None:
    """Every site has finite predictions for all strategies, and the choice is not slower than the plain strategy."""
    for shape in sites(ranks):
        assert all(predict(shape, strategy, H100).us > 0 for strategy in candidates(shape, H100))
        choice = choose(shape, H100)
        assert choice.predictions[str(choice.strategy)].us <= choice.predictions[str(NONE)].us
        near = predict(shape, NONE, H100).us / predict(shape, NONE, H200).us
        assert 0.75 < near < 1.33, shape
    shape = SiteShape("matmul_reduce_scatter", ranks, "bfloat16", ((4096, 8192, 1024, False),), 4096, 8192)
    assert has_direct_times(H100, shape) == (ranks != 3)


@pytest.mark.parametrize("kind", ["bulk_all_gather", "bulk_reduce_scatter", "bulk_all_reduce", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_split_collectives_have_times(kind: str, ranks: int) -> None:
    shape = SiteShape(kind, ranks, "bfloat16", (), 8192, 4096)
    times = split_times(shape, 0, H100)
    assert 0 < times.transfer_us < 2 * times.plain_us and times.assumed == why_assumed(shape, H100) == ""
    if kind == "all_to_all":
        assert all(us > 0 for us in all_to_all_us(shape, H100)) and why_assumed(shape, H200)
