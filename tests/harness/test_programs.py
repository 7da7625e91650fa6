"""Programs on CPU ranks: what a program sees is what torchrun gives it, and how a program ends is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.programs import run_program

pytestmark = pytest.mark.tier("test")

SEES = """
import atexit, os, sys
assert not any(name.partition(".")[0] == "ub_overlap" for name in sys.modules)
import torch.distributed as dist
import sibling
try:
    import benchmarks
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("a script does not see this repository")
if __name__ == "__main__":
    import threading, time
    threading.Thread(target=lambda: (time.sleep(0.3), print("end of a thread"))).start()
    dist.init_process_group("gloo")
    names = [None, None]
    dist.all_gather_object(names, f"{sys.argv[1:]} {os.getcwd()} {os.environ['LOCAL_RANK']} {sibling.NAME}")
    atexit.register(lambda: print(f"end of {dist.get_rank()}: {names}"))
"""
ENDS = """
import os, sys, time
def end(how):
    if how == "returns":
        return
    if os.environ["RANK"] == "0":
        time.sleep(1000)  # in a collective, for example
    if how == "raises":
        raise RuntimeError("no batch")
    sys.exit("no batch" if how == "text" else 3)
end(sys.argv[1])
"""


def test_what_a_program_sees(tmp_path: Path) -> None:
    (tmp_path / "sibling.py").write_text("NAME = 'next to it'\n")
    program = tmp_path / "program.py"
    program.write_text(SEES)
    finished = run_program(2, program, ["--a", "b"], folder=tmp_path)
    names = [f"['--a', 'b'] {tmp_path} {rank} next to it" for rank in (0, 1)]
    assert finished.code == 0, finished.output
    assert all(f"end of {rank}: {names}" in finished.output for rank in (0, 1)), finished.output
    assert finished.output.count("end of a thread") == 2
    shown = run_program(2, program, ["--a", "b"], folder=tmp_path, only_rank_0=True).output
    assert "end of 0" in shown and "end of 1" not in shown


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("raises", 1), ("text", 1), ("number", 3)])
def test_how_a_program_ends(tmp_path: Path, how: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails ends the others."""
    monkeypatch.setattr("tests.harness.programs.GRACE_S", 0.2)
    program = tmp_path / "program.py"
    program.write_text(ENDS)
    finished = run_program(2, program, [how], limit_s=60)
    assert finished.code == code and finished.seconds < 30, finished
    assert ("no batch" in finished.output) == (how in ("raises", "text"))


def test_a_program_that_does_not_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time\nprint('starts', flush=True)\ntime.sleep(1000)\n")
    finished = run_program(1, program, limit_s=3)
    assert finished.code is None and finished.output == "starts\n" and finished.seconds < 30
