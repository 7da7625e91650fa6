"""Tests of `python -m ub_overlap`: output, JSON, exit codes, and independence of the current folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import ub_overlap
from tests.harness.ranks import PATIENCE_S
from tests.harness.tiers import full_but
from ub_overlap import __main__ as cli
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind, Reason
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.runtime import plan_store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Store one plan in a separate store: an overlapped gather and an all_reduce without overlap."""
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    decisions = (
        Decision(
            id="forward.0",
            kind=Kind.ALL_GATHER_MATMUL,
            phase="forward",
            strategy=Strategy(Mode.PIPELINED, 4),
            shapes=(("shard", "[64, 32]"),),
            module="layers.0.attention",
        ),
        Decision(
            id="forward.1",
            kind=Kind.ALL_REDUCE,
            phase="forward",
            strategy=Strategy(Mode.NONE),
            reason=Reason.NO_MATMUL,
        ),
    )
    plan = Plan("forward", decisions)
    plan_store.save(plan.digest, plan.to_json())
    return plan


def run(arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ub_overlap", *arguments],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.tier("test")
@pytest.mark.parametrize("where", full_but(["root"], ["root", "elsewhere"]))
def test_runs_from_anywhere(where: str, tmp_path: Path) -> None:
    """The checkout's folders compiler/ and runtime/ must not shadow the installed package."""
    done = run(["info", "--json"], ROOT if where == "root" else tmp_path)
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["problem"]) == (0, None), done.stderr
    assert facts["ub_overlap"] == ub_overlap.__version__


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"ub_overlap {ub_overlap.__version__}\n"


def test_info_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert cli.main(["info"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"] == torch.__version__
    assert lines["problem"] == "none"


def test_info_says_what_keeps_the_package_from_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ub_overlap._C", None)  # makes its import fail
    assert cli.main(["info", "--json"]) == 1
    assert "_C" in json.loads(capsys.readouterr().out)["problem"]


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["report"], ["report", "show"], ["info", "--nonsense"]])
def test_bad_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2


def test_report_list(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "list"]) == 0
    assert plan.digest in capsys.readouterr().out
    assert cli.main(["report", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["digest"], row["phase"], row["sites"], row["overlapped"]) == (plan.digest, "forward", 2, 1)


def test_report_list_of_an_empty_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path / "none"))
    assert cli.main(["report", "list"]) == 0
    assert "no reports in" in capsys.readouterr().out
    assert cli.main(["report", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("digits", [4, 16])
def test_report_show(plan: Plan, digits: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "show", plan.digest[:digits]]) == 0
    out = capsys.readouterr().out
    for text in (plan.digest, "forward.0", "pipelined:chunks=4", "layers.0.attention", "none: no_matmul"):
        assert text in out
    assert cli.main(["report", "show", plan.digest[:digits], "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == plan


def test_report_show_of_one_that_is_not_there(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    missing = "0" * 16 if not plan.digest.startswith("0") else "f" * 16
    assert cli.main(["report", "show", missing]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no stored report with this digest" in captured.err


def test_report_show_of_an_ambiguous_prefix(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    other = Plan("backward", plan.decisions)
    plan_store.save(other.digest, other.to_json())
    assert cli.main(["report", "show", ""]) == 2
    assert "2 stored reports begin with it" in capsys.readouterr().err
