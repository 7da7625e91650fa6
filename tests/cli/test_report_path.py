"""Tests of reports as arguments: files, digests and their first digits, in every verb that takes a report or plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ub_overlap.cli import bundle, main
from ub_overlap.cli.report_path import find_stored, plan_file, report_path
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import OptionError

SITE = Decision(id="forward.0", kind=Kind.ALL_GATHER_MATMUL, phase="forward", strategy=Strategy(Mode.PIPELINED))
PLAN = Plan("forward", (SITE,))
DIGESTS = ("00aa1111", "00aa2222-0b", "00bb3333")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder, and store a plan and some files of other digests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path / "cache"))
    plan_store.save(PLAN.digest, PLAN.to_json())
    for digest in DIGESTS:
        plan_store.save(digest, json.dumps({"digest": digest}))
    return tmp_path


def explain(text: str) -> bool:
    return main(["explain", text, "--html", "page.html"]) == 0 and "forward.0" in Path("page.html").read_text()


VERBS: dict[str, Callable[[str], bool]] = {
    "report show": lambda text: main(["report", "show", text]) == 0,
    "explain": explain,
    "diff": lambda text: main(["diff", text, text]) == 0,
    "plan --overrides": lambda text: plan_file(text).stem == PLAN.digest,
    "doctor --bundle": lambda text: [e.name for e in bundle.plan_entries([text], 0)] == [f"plans/{PLAN.digest}.json"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_digests(verb: str) -> None:
    assert VERBS[verb](PLAN.digest) and VERBS[verb](PLAN.digest[:6])


def test_files_come_first() -> None:
    """A file whose name is a digest is that file; other names are not looked up."""
    assert report_path("00bb") == plan_store.path_of("00bb3333")
    Path("00bb").write_text("")
    assert report_path("00bb") == Path("00bb") and report_path("report.json") == Path("report.json")


def test_a_digest_with_its_own_part() -> None:
    assert report_path("00aa2222-") == report_path("00aa2222-0b") == report_path("00aa2") == plan_store.path_of("00aa2222-0b")


def test_several_begin_with_it() -> None:
    with pytest.raises(OptionError, match="2 stored reports begin with it") as caught:
        report_path("00aa")
    assert "00aa1111" in caught.value.expected and "00aa2222-0b" in caught.value.expected and "00bb" not in str(caught.value)
    assert {path.stem for path in find_stored("00aa")} == {"00aa1111", "00aa2222-0b"}


@pytest.mark.parametrize("text", ["00bb3433", "00bb34"])
def test_the_closest_digest_is_suggested(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", text]) == 2
    said = capsys.readouterr().err
    assert "did you mean 00bb3333?" in said and "report list" in said and len(said.splitlines()) == 1


def test_nothing_is_suggested_that_is_not_close(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "fedcfedcfedc", PLAN.digest]) == 2
    assert "did you mean" not in (said := capsys.readouterr().err) and "no stored report with this digest" in said


def test_plan_refuses_an_unknown_digest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--model", "llama-8b", "--overrides", "00bb3433"])
    assert stopped.value.code == 2 and "did you mean 00bb3333?" in capsys.readouterr().err
