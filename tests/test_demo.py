"""Tests of the demo and the README's example, and of the demo's check of the loss curves."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.gpu.launch import launch, torchrun
from tests.harness.programs import run_program
from tests.harness.ranks import PATIENCE_S
from tests.harness.tiers import full_but

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
    """The demo finds its own files from another folder. Batch sizes 1 and 2 trace different views."""
    page = tmp_path / "page.html"
    output = run_demo([*SMALL, "--batch", str(batch), "--page", str(page)], tmp_path)
    assert "The loss curves agree." in output
    for kind in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert kind in output
    assert os.environ["UB_OVERLAP_CACHE_DIR"] in output
    assert f"open {page}" in output and "forward.0" in page.read_text()


@pytest.mark.tier("full")
def test_more_ranks_and_no_overlap(tmp_path: Path) -> None:
    """The page is in a new folder of mode 0700, never at a name that another user can prepare."""
    victim, folder = tmp_path / "victim", tmp_path / "tmp"
    folder.mkdir()
    (folder / "ub_overlap_demo.html").symlink_to(victim)
    output = run_demo([*SMALL, "--ranks", "4", "--overlap", "off", "--batch", "2"], TMPDIR=str(folder))
    assert "disabled_by_user" in output
    assert not victim.exists()
    (page,) = re.findall(r"open (\S+\.html)", output)
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

    def outcome(last: float) -> DemoOutcome:
        eager, ours = TrainingRun(losses=[5.5, 5.0], seconds=[1.0, 0.1]), TrainingRun(losses=[5.5, last], seconds=[2.0, 0.1])
        return DemoOutcome(eager=eager, ours=ours, sites="", paths=[])

    for last, code, verdict in ((5.0005, 0, "agree"), (5.01, 1, "DO NOT AGREE"), (float("nan"), 1, "DO NOT AGREE")):
        monkeypatch.setattr(demo, "launch", lambda settings, last=last: outcome(last))
        assert demo.main(["--device", "cpu"]) == code
        assert f"The loss curves {verdict}." in capsys.readouterr().out


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


def test_progress_in_a_log(console: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Outside a terminal, progress prints one line per tenth; disabled (ranks other than 0), it prints nothing."""
    for enabled in (True, False):
        progress = console.ProgressBar(40, enabled=enabled)
        for _ in range(40):
            progress.update("loss")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == f"  [{'#' * 30}] 40/40  loss"
