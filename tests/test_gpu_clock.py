"""The samples of nvidia-smi that tell clock and power of a step."""

from __future__ import annotations

import pytest

from benchmarks.gpu_clock import median_of_samples
from benchmarks.parallel.table import row_text


def test_medians_are_those_of_the_last_samples() -> None:
    """The first samples are from before the power limit acts. A line that is cut off has no numbers."""
    lines = [*["1980, 250.0"] * 4, "1500, 690.0", "1510, 700.0", *["1520, 695.0"] * 3, "1530, 701.5", "15"]
    assert median_of_samples("\n".join(lines)) == {"sm_mhz": 1520.0, "watts": 695.0}


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="gave 1 samples"):
        median_of_samples("1980, 250\n1980, [N/A]\n")


def test_table_shows_clocks_where_any_are_known() -> None:
    variants = {"compute": {"step": 1.0, "sm_mhz": 1515.0, "watts": 699.6}, "ours": {"step": 1.1}}
    row = {"variants": {name: {"why": {}, **v} for name, v in variants.items()}}
    lines = row_text("sizes", row, "simple", "inductor", lambda name: "inductor").splitlines()
    assert "SM MHz" in lines[0] and "1515" in lines[2] and "700" in lines[2] and "1515" not in lines[3]
    del row["variants"]["compute"]["sm_mhz"]
    assert "SM MHz" not in row_text("sizes", row, "simple", "inductor", lambda name: "inductor")
