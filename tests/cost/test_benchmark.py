"""Tests of `python -m benchmarks.cost_model` on a stored table: errors, regret and gain, offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost_model
from ub_overlap.compiler.cost import choose, load, predict
from ub_overlap.compiler.plan.strategy import Strategy

ROW = {"kind": "AG", "name": "qkv", "M": 8192, "N": 10240, "K": 8192, "ranks": 8}


def stored(times: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Return a table of one row; `times` is in microseconds by column."""
    row = {**ROW, "ms": {name: us / 1e3 for name, us in times.items()}, "why": {}}
    return {
        "benchmark": "ops", "device": "cuda", "devices": ["a GPU"] * 8, "ranks": 8, "date": "today", "dtype": "bfloat16",
        "rows": [row], **changes,
    }  # fmt: skip


def us(strategy: str) -> float:
    return predict(cost_model.shape_of(ROW, "bfloat16"), Strategy.parse(strategy), load("h200")).us


def test_errors_regret_and_gain() -> None:
    """Errors, regret and gain are right for known times.

    Most times are exactly half of the predictions. The fastest strategy is one that is not chosen.
    """
    times = {"seq_g": us("none") / 2, "seq": 1.0, "ours_g pipelined": us("pipelined") / 2, "ours pipelined": 1.0}
    times["ours_g pipelined:chunks=1"] = us("pipelined") / 4
    (row,) = cost_model.rows_of(stored(times), load("h200"))
    assert row.chosen == "pipelined"
    assert set(row.measured) == {"none", "pipelined", "pipelined:chunks=1"}
    assert row.errors["none"] == pytest.approx(1) and row.errors["pipelined"] == pytest.approx(1)
    assert row.regret == pytest.approx(1)
    assert row.gain == pytest.approx(us("none") / us("pipelined"))
    found = cost_model.summary([row])
    assert (found["times"], found["median error"], found["worst regret"]) == (3, pytest.approx(1), pytest.approx(1))


def test_only_what_was_timed_is_open() -> None:
    shape = cost_model.shape_of(ROW, "bfloat16")
    assert choose(shape, load("h200")).strategy != Strategy.parse("pipelined:chunks=2")
    timed = choose(shape, load("h200"), timed=("pipelined:chunks=1", "pipelined:chunks=2"))
    assert set(timed.predictions) == {"none", "pipelined:chunks=1", "pipelined:chunks=2"}
    assert str(timed.strategy) in ("pipelined:chunks=1", "pipelined:chunks=2")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(2)]
    for path in paths:
        path.write_text(json.dumps(stored({"seq_g": 600.0, "ours_g pipelined": 400.0})))
    assert cost_model.main([*map(str, paths), "--profile", "h200", "--json", str(tmp_path / "out.json")]) == 0
    text = capsys.readouterr().out
    assert "AG qkv 8192" in text and "all: 4 times of 2 rows" in text and f"/ {400}" in text
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["rows"][0]["chosen"] == "pipelined" and found["rows"][0]["gain"] == pytest.approx(1.5)


@pytest.mark.parametrize(("gpu", "profile"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200")])
def test_the_profile_of_the_tables_device(tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, profile: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(stored({"seq_g": 600.0, "ours_g pipelined": 400.0}, devices=[gpu] * 8)))
    assert cost_model.main([str(path)]) == 0
    assert f"profile {load(profile)}" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "told"), [("{}", "expected 'ops'"), ("{", "cost_model"), (None, "no-such")])
def test_what_is_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, told: str) -> None:
    path = tmp_path / "no-such.json"
    if text is not None:
        path.write_text(text)
    assert cost_model.main([str(path)]) == 1
    assert told in capsys.readouterr().err


def test_a_row_in_float8() -> None:
    """An FP8 row is predicted faster.

    Its gather sends 1 byte per element and its matmul is FP8. Its scatter stays in 16 bits, so its communication time is equal.
    """
    for kind, travels, share in (("AG", "float8", 0.7), ("RS", "bfloat16", 0.97)):
        shapes = [cost_model.shape_of({**ROW, "kind": kind, **more}, "bfloat16") for more in ({"fp8": "row"}, {})]
        assert (shapes[0].dtype, shapes[0].multiplied) == (travels, "float8")
        fast, plain = (predict(shape, Strategy.parse("pipelined"), load("h200")).us for shape in shapes)
        assert fast < share * plain
