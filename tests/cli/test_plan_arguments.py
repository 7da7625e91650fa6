"""Tests of `plan` before and during its work: all arguments are checked without torch, and progress is shown."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ranks import PATIENCE_S
from ub_overlap.cli import main, progress

pytestmark = pytest.mark.tier("test")

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from ub_overlap.cli import main; sys.exit(main(sys.argv[1:]))"
MODEL = ("--model", "llama-8b")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "llama-9b"), "unknown model"),
        ((*MODEL, "--tp", "3"), "a multiple of tp=3"),
        ((*MODEL, "--dtype", "int4"), "bf16 or fp16 or fp32"),
        ((*MODEL, "--seq", "many"), "--seq"),
        ((*MODEL, "--profile", "h900"), "h900"),
        ((*MODEL, "--overrides", "nowhere.yaml"), "file not found"),
        ((*MODEL, "--overrides", "bad.json"), "bad.json"),
        ((*MODEL, "--min-bytes", "-1"), "an integer of at least 0"),
        ((*MODEL, "--memory-budget", "nan"), "a number of at least 0"),
        ((*MODEL, "--save", "nowhere/plan.json"), "the folder of 'nowhere/plan.json' does not exist"),
        ((*MODEL, "--save", "."), "is a folder"),
        ((*MODEL, "--timeline", "nowhere/step.json"), "does not exist"),
        ((*MODEL, "--html", "nowhere/page.html"), "does not exist"),
    ],
    ids=str,
)
def test_bad_arguments_are_found_before_any_work(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """Without torch a check that comes too late is another error."""
    (tmp_path / "bad.json").write_text('{"forward.0": "sideways"}')
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "plan", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_calibrate_outside_of_torchrun_is_found_before_torch_is_loaded() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "calibrate"],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2 and "torchrun --nproc-per-node N -m ub_overlap calibrate" in done.stderr


def test_a_picture_needs_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main(["plan", *MODEL, "--timeline", str(tmp_path / "step.png")]) == 2
    assert "--timeline FILE.png needs matplotlib" in capsys.readouterr().err


WAITS = """
import sys, time, types
from ub_overlap.cli import main, progress
progress.LINES_EVERY_S = 0.1
class Step:
    def text(self, width): return "the answer"
    def to_json(self): return "{}"
def plan_step(sizes, options, graphs, progress):
    time.sleep(1.0)
    progress("tracing")
    time.sleep(0.5)
    return Step()
planner = types.ModuleType("ub_overlap.tools.planner.planned_step"); planner.plan_step = plan_step
options = types.ModuleType("ub_overlap.compiler.options"); options.parse = lambda *_: (None, {})
sys.modules.update({planner.__name__: planner, options.__name__: options})
sys.exit(main(["plan", "--model", "llama-8b", *sys.argv[1:]]))
"""


def run_in_a_terminal(*arguments: str, **variables: str) -> tuple[str, str]:
    """Run a stand-in for planning with stderr on a terminal. Return stdout and stderr."""
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", WAITS, *arguments], stdout=subprocess.PIPE, stderr=theirs, text=True,
        env={**os.environ, "TERM": "xterm", **variables},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    out, _ = run.communicate(timeout=PATIENCE_S)
    os.close(ours)
    assert run.returncode == 0, shown
    return out, shown.decode()


def test_progress_on_a_terminal() -> None:
    """The first step is shown while it runs: it takes a second, and a frame is drawn ten times a second."""
    out, shown = run_in_a_terminal()
    assert out == "the answer\n" and "plan: loading torch" in shown and "plan: tracing" in shown


def test_progress_on_a_dumb_terminal() -> None:
    out, shown = run_in_a_terminal(TERM="dumb")
    assert out == "the answer\n" and "\x1b" not in shown
    assert_lines(shown)


@pytest.mark.parametrize("flag", ["--quiet", "--json"])
def test_no_progress_if_not_wanted(flag: str) -> None:
    assert run_in_a_terminal(flag)[1] == ""


def test_progress_on_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == "the answer\n"
    assert_lines(done.stderr)


def assert_lines(shown: str) -> None:
    """There is a line every 0.1 s, with the step that runs and the seconds so far; a step of 1 s has several."""
    lines = shown.splitlines()
    assert all(re.fullmatch(r"plan: (loading torch|tracing) \(\d+ s\)", line) for line in lines), shown
    assert lines[0].startswith("plan: loading torch") and sum("loading torch" in line for line in lines) >= 2
    assert lines[-1].startswith("plan: tracing")


def test_a_quick_command_shows_no_progress_on_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_progress("plan") as report:
        report("tracing")
    assert capsys.readouterr().err == ""
