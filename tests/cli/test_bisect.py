"""Tests of `bisect` on a stand-in training command.

The command stores a plan. Its loss depends on which sites are overlapped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ub_overlap import __main__ as cli
from ub_overlap.cli.bisect import find_bad_sites

TRAINING = """
import fnmatch, json, os, pathlib, sys, time
ids = [f"{phase}.{i}" for phase in ("forward", "backward") for i in range(6)]
off = os.environ["UB_OVERLAP_DISABLE"].split(",")
on = [i for i in ids if not any(fnmatch.fnmatchcase(i, p) for p in off)]
row = {"kind": "all_gather_matmul", "module": "mlp", "source": "model.py:1: x"}
folder = pathlib.Path(os.environ["UB_OVERLAP_CACHE_DIR"], "plans")
folder.mkdir(parents=True, exist_ok=True)
sites = [{"id": i, "strategy": "pipelined" if i in on else "none", **row} for i in ids]
(folder / "00112233.json").write_text(json.dumps({"sites": sites}))
wrong = sys.argv[1] == "always" or set(sys.argv[1].split(",")) <= set(on)
print("step 1 loss 9.0", flush=True)
if sys.argv[2] == "hang":
    time.sleep(60)
print("step 2 loss", "nan" if wrong and sys.argv[2] == "nan" else 3.0 if wrong else 2.0)
sys.exit(3 if wrong and sys.argv[2] == "crash" else 0)
"""


def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guilty: str, how: str, *flags: str) -> int:
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
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
    assert [s["site"] for s in found["sites"]] == [guilty] and found["runs"] <= 2 + 2 * 4


def test_two_sites_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(tmp_path, monkeypatch, "forward.0,backward.5", "crash") == 0
    out = capsys.readouterr().out
    assert "bad only together" in out and "forward.0" in out and "backward.5" in out


def test_nothing_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert find(tmp_path, monkeypatch, "forward.0", "loss") == 1  # the command exits with code 0
    assert "good with all sites" in capsys.readouterr().err
    assert find(tmp_path, monkeypatch, "always", "crash") == 1  # fails with every set of sites
    assert "bad without any overlap" in capsys.readouterr().err
    assert find(tmp_path, monkeypatch, "always", "hang", "--timeout", "0.5") == 1
    assert "exit code 124" in capsys.readouterr().err
    for arguments in (["bisect"], ["bisect", "--loss", "(", "--", "x"], ["bisect", "--loss", "loss", "--", "x"]):
        with pytest.raises(SystemExit) as exit:
            cli.main(arguments)
        assert exit.value.code == 2


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_find_bad_sites(count: int) -> None:
    sites = [f"forward.{i}" for i in range(count)]
    for guilty in sites:
        tried: list[int] = []

        def is_bad(enabled: Sequence[str], guilty: str = guilty, tried: list[int] = tried) -> bool:
            tried.append(len(enabled))
            return guilty in enabled

        assert find_bad_sites(sites, is_bad) == [guilty] and len(tried) <= 2 * count.bit_length()
