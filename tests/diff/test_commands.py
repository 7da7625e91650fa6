"""Tests of `explain`, `diff` and `doctor` on the command line: output, files, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.diff.samples import before, graphs, report, with_clone
from tests.harness.ranks import PATIENCE_S
from ub_overlap import __main__ as cli
from ub_overlap.cli import doctor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(report()))
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return another graph with another decision."""
    b = report()
    b["sites"] = [{**b["sites"][0], "strategy": "none", "reason": "no_gain", "detail": "too small"}, *b["sites"][1:]]
    b["graphs"] = [{**graphs().to_dict(), "before": with_clone(before()).to_dict()}]
    path = tmp_path / "b.json"
    path.write_text(json.dumps(b))
    return path


def test_explain(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(stored)]) == 0
    out = capsys.readouterr().out
    assert "none: non_linear" in out and "all_gather + wait + 2 matmuls -> all_gather_matmul" in out
    assert cli.main(["explain", str(stored), "--site", "forward.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [s["id"] for s in found["sites"]] == ["forward.1"] == [e["site"] for d in found["diff"] for e in d["edits"]]
    assert cli.main(["explain", str(stored), "--text"]) == 0
    assert "+fused = ub_overlap.all_gather_matmul.default(x, [t, t_1]" in capsys.readouterr().out
    assert cli.main(["explain", str(stored), "--site", "forward.9"]) == 2
    assert "expected: one of forward.0, forward.1, forward.2" in capsys.readouterr().err


def test_steps_for_perfetto(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stored report's steps, without overlap and as decided, each in its process. A site without steps is an error."""
    written = tmp_path / "steps.json"
    assert cli.main(["explain", str(stored), "--perfetto", str(written), "--site", "forward.0"]) == 0
    events = json.loads(written.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"predicted, none", "predicted, pipelined"}
    assert len([e for e in events if e["ph"] == "X" and e["cat"] == "forward.0"]) == 6
    assert cli.main(["explain", str(stored), "--perfetto", str(written), "--site", "forward.1"]) == 2
    assert "no timeline" in capsys.readouterr().err


def test_files(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {flag: tmp_path / f"out{flag}" for flag in ("--html", "--dot", "--model-explorer")}
    assert cli.main(["explain", str(stored), *(text for pair in wanted.items() for text in map(str, pair))]) == 0
    assert wanted["--html"].read_text().startswith("<!doctype html>")
    assert wanted["--dot"].read_text().startswith("digraph")
    assert len(json.loads(wanted["--model-explorer"].read_text())["graphs"]) == 2
    assert capsys.readouterr().err.count("wrote ") == 3


def test_diff(stored: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", str(stored), str(stored)]) == 0
    assert "no difference: 1 graphs" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert cli.main(["diff", str(stored), str(other), "--html", str(page)]) == 1
    out = capsys.readouterr().out
    assert "nothing -> clone" in out and "no_gain" in out and "/home/me/model.py:12" in out
    assert "a.json against" in page.read_text()
    assert cli.main(["diff", str(stored), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["sites"] == [{"site": "forward.0", "strategy": ["pipelined", "none"], "reason": ["None", "no_gain"]}]
    assert not found["same"] and len(found["before"][0]["edits"]) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"version": 9, "sites": []}', '{"version": 1, "sites": [], "graphs": [{}]}'])
def test_what_is_no_report(text: str, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    assert cli.main(["diff", str(stored), str(bad)]) == 2
    assert cli.main(["explain", str(bad)]) == 2
    assert "bad.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        cli.main(["diff", str(stored)])
    assert exit.value.code == 2


@pytest.mark.tier("test")
def test_explain_needs_no_torch(stored: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from ub_overlap.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", str(stored)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0 and "forward.0" in done.stdout, done.stderr


@pytest.mark.tier("test")
def test_doctor_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    works = {v["what"]: v["works"] for v in facts["verdicts"]}
    assert works["import torch"] and works["this torch"] and works["the extension"] and works["keep plans and graphs"]
    assert works["overlap between CPU ranks of this host"]
    assert "works  import torch" in doctor.text(facts)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("raise ImportError('libtorch.so: cannot open')", "libtorch.so: cannot open"),
        ("import os; print('before'); os.abort()", "exit code -6"),
        ("__version__ = '2.4.0'", "No module named 'torch.distributed'"),
    ],
)
def test_doctor_where_torch_is_broken(torch: str, said: str, tmp_path: Path) -> None:
    """`doctor` never fails; it reports what is broken and what still works."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(torch)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "ub_overlap", "doctor", "--json"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    facts = json.loads(done.stdout)
    first, last = facts["verdicts"][0], facts["verdicts"][-1]
    assert not first["works"] and said in first["why"] and first["fix"]
    assert last["works"] and "read reports" in last["what"]


GPUS = {
    "torch": {"version": "2.11.0+cu130"},
    "private_names": {"missing": []},
    "extension": {"cuda": True},
    "symmetric": {"there": True},
    "devices": {"count": 2, "names": ["H200", "H200"], "peers": [[True, True], [True, True]]},
    "nvlink": {"links": [[0, 18], [18, 0]]},
    "profile": {"name": "h200"},
}


@pytest.mark.parametrize(
    ("change", "works", "said"),
    [
        ({}, True, "2 x H200: NVLink and peer access between all"),
        (
            {"devices": {**GPUS["devices"], "peers": [[True, False], [False, True]]}},
            False,
            "no peer access between GPUs 0 and 1",
        ),
        ({"nvlink": {"links": [[0, 0], [0, 0]]}}, False, "no NVLink between GPUs 0 and 1"),
        ({"nvlink": {"links": None}}, True, "the links are unknown"),
        ({"extension": {"cuda": False}}, False, "no CUDA executor"),
        ({"devices": {"count": 1, "names": ["H200"], "peers": [[True]]}}, False, "torch sees 1 GPU, nvidia-smi 2"),
        ({"devices": {"problem": "RuntimeError: no driver"}}, False, "no driver"),
    ],
)
def test_doctor_of_gpus(change: dict[str, object], works: bool, said: str) -> None:
    facts = {
        "probe": {**GPUS, **change}, "nvidia_smi": {"gpus": ["0, H200", "1, H200"]}, "system": {"memory_free": 1 << 34},
        "store": {"folder": "/tmp"},
    }  # fmt: skip
    (verdict,) = (v for v in doctor.verdicts(facts) if v.what == "overlap between GPUs of this host")
    assert verdict.works is works and said in verdict.why


@pytest.mark.parametrize(
    ("variable", "on_path", "found"),
    [
        ("", {"g++": "/bin/g++", "clang++": "/bin/clang++"}, "/bin/g++"),
        ("", {"clang++": "/bin/clang++"}, ""),
        ("clang++", {"clang++": "/bin/clang++"}, "/bin/clang++"),
        ("ccache g++", {"ccache": "/bin/ccache"}, ""),
        ("icpx", {"g++": "/bin/g++"}, ""),
        ("", {}, ""),
    ],
)
def test_doctor_looks_for_a_compiler(
    monkeypatch: pytest.MonkeyPatch, variable: str, on_path: dict[str, str], found: str
) -> None:
    monkeypatch.setenv("CXX", variable)
    monkeypatch.setattr(doctor.shutil, "which", on_path.get)
    assert doctor._compiler() == found
    verdict = doctor._compiling(found)
    assert verdict.works is bool(found) and (found or "no C++ compiler") in verdict.why and bool(verdict.fix) is not bool(found)


def test_doctor_says_units() -> None:
    facts = {
        "ub_overlap": "0.1.0", "system": {"memory_free": 3 << 29, "compiler": ""}, "store": {"folder": "/tmp", "plans": 3},
        "probe": {}, "nvidia_smi": {}, "environment": {}, "verdicts": [],
    }  # fmt: skip
    text = doctor.text(facts, color=False)
    assert "memory_free  1.5 GiB" in text and "compiler     none" in text and "plans        3" in text
