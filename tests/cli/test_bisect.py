"""Tests of `bisect` on a stand-in training command.

The command stores a plan. Its loss depends on which sites are overlapped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ub_overlap import __main__ as cli
from ub_overlap.cli import progress, trial
from ub_overlap.cli.bisect import find_bad_sites, overlapped_since
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind, Reason
from ub_overlap.compiler.plan.strategy import Mode, Strategy, parse
from ub_overlap.runtime import plan_store

pytestmark = pytest.mark.tier("test")

TRAINING = """
import fnmatch, json, os, pathlib, sys, time
plan = json.loads(pathlib.Path(__file__).with_name("plan.json").read_text())
off = os.environ["UB_OVERLAP_DISABLE"].split(",")
on = [s["id"] for s in plan["sites"] if not any(fnmatch.fnmatchcase(s["id"], p) for p in off)]
for site in plan["sites"]:
    site["strategy"] = "pipelined" if site["id"] in on else "none"
folder = pathlib.Path(os.environ["UB_OVERLAP_CACHE_DIR"], "plans")
folder.mkdir(parents=True, exist_ok=True)
(folder / "00112233.json").write_text(json.dumps(plan))
wrong = sys.argv[1] == "always" or set(sys.argv[1].split(",")) <= set(on)
print("step 1 loss 9.0", flush=True)
if sys.argv[2] == "hang" or sys.argv[2] == "hang_if_wrong" and wrong:
    time.sleep(60)
print("step 2 loss", "nan" if wrong and sys.argv[2] == "nan" else 3.0 if wrong else 2.0)
sys.exit(3 if wrong and sys.argv[2] == "crash" else 0)
"""


def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guilty: str, how: str, *flags: str) -> int:
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    plan = Plan("forward", tuple(
        Decision(id=f"{phase}.{i}", kind=Kind.ALL_GATHER_MATMUL, phase=phase, strategy=Strategy(Mode.PIPELINED), module="mlp")
        for phase in ("forward", "backward") for i in range(6)
    ))  # fmt: skip
    (tmp_path / "plan.json").write_text(plan.to_json())
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    return cli.main(["bisect", *flags, "--", sys.executable, str(script), guilty, how])


@pytest.mark.parametrize("guilty", ["forward.0", "forward.5", "backward.3"])
@pytest.mark.parametrize(
    ("how", "flags"), [("crash", ()), ("loss", ("--loss", r"loss (\S+)")), ("nan", ("--loss", r"loss (\S+)"))]
)
def test_one_site(
    guilty: str,
    how: str,
    flags: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert find(tmp_path, monkeypatch, guilty, how, "--json", *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "found" and [s["site"] for s in found["sites"]] == [guilty]
    runs = found["runs"]
    assert len(runs) <= 2 + 2 * 4 and [r["number"] for r in runs] == list(range(1, len(runs) + 1))
    assert [r["outcome"] for r in runs[:2]] == ["good", "bad"] and runs[0]["disabled"] == "*" and runs[1]["disabled"] == ""
    assert all("step 1 loss 9.0" in Path(r["log"]).read_text() for r in runs)


def test_two_sites_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(tmp_path, monkeypatch, "forward.0,backward.5", "crash") == 0
    out = capsys.readouterr().out
    assert "bad only together" in out and "forward.0" in out and "backward.5" in out


def test_nothing_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(tmp_path, monkeypatch, "forward.0", "loss") == 1  # the command exits with code 0
    assert "good with all sites" in capsys.readouterr().err
    assert find(tmp_path, monkeypatch, "always", "crash") == 1  # fails with every set of sites
    assert "bad without any overlap" in capsys.readouterr().err
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path / "empty"))
    assert cli.main(["bisect", "--json", "--", sys.executable, "-c", EMPTY_PLANS]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "no_sites"


EMPTY_PLANS = "import os, sys; sys.exit(os.environ['UB_OVERLAP_DISABLE'] != '*')"


@pytest.mark.parametrize("arguments", [
    ["bisect"], ["bisect", "--loss", "(", "--", "true"], ["bisect", "--loss", "loss", "--", "true"],
    ["bisect", "--", "no-such-command-here"], ["bisect", "--timeout", "0", "--", "true"], ["bisect", "--", "/etc/passwd"],
    ["bisect", "--logs", "/dev/null/x", "--", "true"], ["bisect", "--on-timeout", "maybe", "--", "true"],
])  # fmt: skip
def test_bad_usage_is_found_before_the_first_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    assert "run 1" not in (text := capsys.readouterr().err) and len(text.splitlines()) == 1


@pytest.mark.tier("full")
def test_timeouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A hang is bad by default; --on-timeout stop ends the search. Neither is a failure with an exit code."""
    assert find(tmp_path, monkeypatch, "forward.0", "hang_if_wrong", "--timeout", "1", "--json") == 0
    answer, said = capsys.readouterr()
    found = json.loads(answer)
    timed_out = [r for r in found["runs"] if r["timed_out"]]
    assert [s["site"] for s in found["sites"]] == ["forward.0"] and len(timed_out) >= 3
    assert all(r["outcome"] == "timeout" and r["exit_code"] is None for r in timed_out)
    assert "run 2: all sites overlapped: timed out after 1 s: timeout\n    step 1 loss 9.0\n" in said
    assert find(tmp_path, monkeypatch, "forward.0", "hang_if_wrong", "--timeout", "1", "--json", "--on-timeout", "stop") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["sites"], len(found["runs"])) == ("timeout", [], 2)
    assert find(tmp_path, monkeypatch, "always", "hang", "--timeout", "0.5") == 1
    assert "the command is bad without any overlap (run 1: timed out after" in capsys.readouterr().err


def test_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of every run is in a file; the tail of a failed run is shown; --show-output and --quiet."""
    logs = tmp_path / "logs"
    assert find(tmp_path, monkeypatch, "always", "crash", "--logs", str(logs), "--json") == 1
    answer, said = capsys.readouterr()
    found = json.loads(answer)
    assert found["status"] == "bad_without_overlap" and found["message"] and found["sites"] == []
    assert [(r["number"], r["exit_code"], r["outcome"], r["log"]) for r in found["runs"]] == [
        (1, 3, "bad", f"{logs}/run-1.log")
    ]
    assert (logs / "run-1.log").read_text().splitlines()[1:] == ["step 1 loss 9.0", "step 2 loss 3.0"]
    assert "UB_OVERLAP_DISABLE='*'" in (logs / "run-1.log").read_text()
    assert "run 1: no sites overlapped: exit code 3 after 0 s: bad\n    step 1 loss 9.0\n    step 2 loss 3.0\n" in said
    find(tmp_path, monkeypatch, "always", "crash", "--tail", "1")
    assert "    step 2 loss 3.0" in (said := capsys.readouterr().err) and "step 1 loss" not in said
    find(tmp_path, monkeypatch, "always", "crash", "--show-output")
    assert "\nstep 1 loss 9.0\nstep 2 loss 3.0\n" in capsys.readouterr().err
    find(tmp_path, monkeypatch, "always", "crash", "--quiet")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_progress_on_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run says every few seconds that it runs: one that hangs for a second does, with a line every 0.1 s."""
    monkeypatch.setattr(progress, "LINES_EVERY_S", 0.1)
    assert find(tmp_path, monkeypatch, "always", "hang", "--timeout", "1") == 1
    assert capsys.readouterr().err.count("bisect: run 1: no sites overlapped (") >= 2


def test_large_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of the output is searched, so that a log of gigabytes does not fill the memory."""
    monkeypatch.setattr(trial, "MAX_OUTPUT", 40)
    command = [sys.executable, "-c", "print('loss 1.0'); print('x' * 100); print('loss 2.0')"]
    run = trial.Runner(command, tmp_path, 60, re.compile(r"loss (\S+)"), False).run("all", "")
    assert run.loss == 2.0 and run.last_lines(5) == ["loss 2.0"] and "loss 1.0" in run.log.read_text()


def test_the_users_own_patterns_stay_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UB_OVERLAP_DISABLE", "forward.0")
    assert find(tmp_path, monkeypatch, "forward.0", "crash", "--json") == 1
    assert json.loads(capsys.readouterr().out)["status"] == "good"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_command(how: signal.Signals, tmp_path: Path) -> None:
    """The command runs in a session of its own, so the interrupt is passed on: its grandchild ends too."""
    mark = tmp_path / "grandchild"
    script = (
        f"import subprocess, time; open({str(mark)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)"
    )
    bisect = subprocess.Popen(
        [sys.executable, "-m", "ub_overlap", "bisect", "--logs", str(tmp_path / "logs"), "--", sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    bisect.send_signal(how)
    _, said = bisect.communicate(timeout=30)
    assert bisect.returncode == 130 and said.splitlines()[-1].endswith("bisect: interrupted") and "Traceback" not in said
    status = Path(f"/proc/{mark.read_text()}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()


RANK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys, time
{at_sigterm}
rank = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
subprocess.Popen(rank, start_new_session=True).wait()
"""


@pytest.mark.parametrize(
    "at_sigterm", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"], ids=["dies", "waits"]
)
def test_a_rank_in_another_session_ends(at_sigterm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's ranks have sessions of their own and may ignore SIGTERM; torchrun itself dies of it, or waits for them."""
    monkeypatch.setattr(trial, "GRACE_S", 0.5)
    mark = tmp_path / "rank"
    command = [sys.executable, "-c", LAUNCHER.format(at_sigterm=at_sigterm), RANK, str(mark)]
    run = trial.Runner(command, tmp_path, 2.0, None, False).run("all", "")
    assert run.timed_out and mark.exists()
    status = Path(f"/proc/{mark.read_text()}/status")
    deadline = time.monotonic() + 5
    while (lives := status.exists() and "Z (zombie)" not in status.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if lives:
        os.kill(int(mark.read_text()), signal.SIGKILL)
    assert not lives, "the rank is an orphan"


@pytest.mark.parametrize("mode", Mode)
def test_sites_of_every_mode_are_found(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A collective that is left alone or merged, and a reason with the name of a mode, are no overlapped sites."""
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    common = {"kind": Kind.ALL_REDUCE, "phase": "step", "detail": "bulk needs an independent matmul"}
    decisions = [
        Decision(id="step.10", strategy=Strategy(mode), reason=Reason.NO_MATMUL if mode is Mode.NONE else None, **common),
        Decision(id="step.9", strategy=Strategy(mode), reason=Reason.NO_MATMUL if mode is Mode.NONE else None, **common),
        Decision(id="step.2", strategy=parse("64=none;*=none|direct"), **common),
        Decision(id="step.3", strategy=Strategy(Mode.NONE), reason=Reason.STRATEGY_ILLEGAL, **common),
    ]
    plan = Plan("step", tuple(decisions))
    plan_store.save(plan.digest, plan.to_json())
    found = ["step.2", "step.9", "step.10"] if mode.is_overlapped else ["step.2"]
    assert list(overlapped_since(0.0)) == found
    assert cli.main(["report", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["overlapped"] == len(found)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_find_bad_sites(count: int) -> None:
    sites = [f"forward.{i}" for i in range(count)]
    for guilty in sites:
        tried: list[int] = []

        def is_bad(enabled: Sequence[str], guilty: str = guilty, tried: list[int] = tried) -> bool:
            tried.append(len(enabled))
            return guilty in enabled

        assert find_bad_sites(sites, is_bad) == [guilty] and len(tried) <= 2 * count.bit_length()
