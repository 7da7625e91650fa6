"""Tests of the demo and the README's example, and of the demo's check of the loss curves."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.gpu.launch import launch, torchrun
from tests.harness.programs import run_program
from tests.harness.ranks import PATIENCE_S
from tests.harness.tiers import full_but
from ub_overlap.cli import build_parser, main

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SMALL = ["--device", "cpu", "--steps", "3", "--dim", "64", "--layers", "1", "--seq", "32", "--inner", "aot_eager"]


def run_demo(arguments: Sequence[str], folder: Path = ROOT, **environment: str) -> str:
    """Return the output of the demo, started in `folder`."""
    finished = run_program(1, EXAMPLES / "llama_tp/demo.py", arguments, environment, folder)
    assert finished.code == 0, finished.output
    return finished.output


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return examples/llama_tp/console.py as a module."""
    spec = importlib.util.spec_from_file_location("demo_console", EXAMPLES / "llama_tp/console.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo_console", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.tier("test")
@pytest.mark.parametrize("batch", full_but([], [1, 2]))
def test_curves_agree(batch: int, tmp_path: Path) -> None:
    """The demo finds its own files from another folder. Batch sizes 1 and 2 trace different views.

    It ends with a verdict, times of three variants and commands. Lines that have no path have at most 100 columns.
    """
    page = tmp_path / "page.html"
    output = run_demo([*SMALL, "--batch", str(batch), "--page", str(page)], tmp_path)
    for kind in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert kind in output
    assert f"  {page}\n" in output and "forward.0" in page.read_text() and "disabled_by_user" not in page.read_text()
    found = re.search(
        r"The losses agree \(largest difference \S+, allowed 1e-03\); (\d+) of (\d+) collectives overlapped", output
    )
    assert found and int(found[1]) == int(found[2]) > 0
    assert [line for line in output.splitlines() if len(line) > 100 and os.sep not in line] == []
    verdict, times, commands = output[found.start() :].split("\n\n")
    assert verdict.splitlines()[1:] == [
        "CPU executor: correctness only. These times show no gain and no loss; gains need GPUs."
    ]
    header, _, first, others = times.splitlines()
    assert re.split("  +", header) == ["step time", "eager", 'overlap="off"', "overlapped"]
    assert all(len(re.findall(r"[0-9]+\.[0-9]\b", line)) == 3 for line in (first, others))
    assert_commands_work(commands)


def assert_commands_work(text: str) -> None:
    """The demo's own command parses as it does; the others run here."""
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("    ")]
    assert len(lines) == 3
    for python, *words in lines:
        assert os.path.samefile(python, sys.executable)
        if words[:2] == ["-m", "ub_overlap"]:
            build_parser().parse_args(words[2:])
        else:
            assert os.path.samefile(words[0], EXAMPLES / "llama_tp/demo.py") and words[1:] == ["--overlap", "auto"]
    assert main([*lines[0][3:], "--json"]) == 0


@pytest.mark.tier("full")
def test_more_ranks_and_no_overlap(tmp_path: Path) -> None:
    """The page is in a new folder of mode 0700, never at a name that another user can prepare."""
    victim, folder = tmp_path / "victim", tmp_path / "tmp"
    folder.mkdir()
    (folder / "ub_overlap_demo.html").symlink_to(victim)
    output = run_demo([*SMALL, "--ranks", "4", "--overlap", "off", "--batch", "2"], TMPDIR=str(folder))
    assert "disabled_by_user" in output
    assert not victim.exists()
    (page,) = re.findall(r"  (\S+\.html)\n", output)
    assert Path(page).is_relative_to(folder) and Path(page).is_file()
    assert Path(page).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--dim", "100"], "--dim 100: expected a multiple of 64"),
        (["--ranks", "3"], "num_heads=8 must divide by the number of ranks, 3"),
        (["--device", "cuda", "--ranks", "512"], "512 ranks need as many GPUs"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "llama_tp")
    import demo

    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_curves_that_differ_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo fails if the loss curves differ at the second step or are not finite."""
    monkeypatch.syspath_prepend(EXAMPLES / "llama_tp")
    import demo
    from train import DemoOutcome, TrainingRun

    def outcome(plain: float, last: float) -> DemoOutcome:
        eager, off, ours = (TrainingRun(losses=[5.5, loss], seconds=[1.0, 0.1]) for loss in (5.0, plain, last))
        return DemoOutcome(eager=eager, plain=off, ours=ours, sites="", overlapped=0, collectives=0, digests=[])

    for plain, last, code, verdict in (
        (5.0, 5.0005, 0, "agree"), (5.0, 5.01, 1, "DO NOT AGREE"), (5.01, 5.0, 1, "DO NOT AGREE"),
        (5.0, float("nan"), 1, "DO NOT AGREE"),
    ):  # fmt: skip
        monkeypatch.setattr(demo, "launch", lambda settings, plain=plain, last=last: outcome(plain, last))
        assert demo.main(["--device", "cpu"]) == code
        assert f"The losses {verdict} (" in capsys.readouterr().out


def test_the_verdict_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratios of median step times, of steps that were not compiled."""
    monkeypatch.syspath_prepend(EXAMPLES / "llama_tp")
    import demo
    from train import DemoOutcome, TrainingRun

    eager, off, ours = (TrainingRun(losses=[1.0] * 3, seconds=[9.0, s, s]) for s in (0.4, 0.15, 0.1))
    outcome = DemoOutcome(eager=eager, plain=off, ours=ours, sites="", overlapped=0, collectives=0, digests=["00112233"])
    assert demo.time_verdict(outcome, "cuda") == (
        "A step with overlap is 1.50 times as fast as without overlap, 4.00 times as fast as eager."
    )


def test_a_rank_that_dies_fails_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "llama_tp")
    from torch.multiprocessing import ProcessExitedException

    import demo

    def launch(settings: object) -> None:
        raise ProcessExitedException("process 1 terminated with signal SIGKILL", error_index=1, error_pid=1, exit_code=-9)

    monkeypatch.setattr(demo, "launch", launch)
    assert demo.main(["--device", "cpu"]) == 1
    assert "demo failed: process 1 terminated with signal SIGKILL" in capsys.readouterr().err


@pytest.mark.tier("test")
def test_readme_example() -> None:
    """examples/tp_mlp.py runs under torchrun, and the README contains its exact code."""
    example = EXAMPLES / "tp_mlp.py"
    finished = launch([*torchrun(2), str(example)], PATIENCE_S)
    assert finished.code == 0, finished.output
    assert "all_gather_matmul" in finished.output
    body = example.read_text().partition('"""\n\n')[2]
    assert body in (ROOT / "README.md").read_text()


def test_plot(console: ModuleType) -> None:
    lines = console.plot([4.0, 2.0, 1.0], [4.0, 3.0, 1.0], height=4).splitlines()
    assert lines[0] == "  4.0000 |*  "
    assert lines[1] == "         | u "
    assert lines[2] == "         | e "
    assert lines[3] == "  1.0000 |  *"
    with pytest.raises(ValueError, match="curves of 1 and 2 values"):
        console.plot([1.0], [1.0, 2.0])


def test_wrapped_lines(console: ModuleType) -> None:
    """Lines are wrapped at 100 columns, also of the log; a path is not cut."""
    path = "/" + "x" * 120
    record = logging.LogRecord("ub_overlap", logging.WARNING, "", 0, "%s", (f"{'word ' * 40}\n{path}",), None)
    lines = console.WrappedLines().format(record).splitlines()
    assert max(map(len, lines[:-1])) <= 100 and len(lines) == 4 and lines[-1] == path
