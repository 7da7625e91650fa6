"""Tests that metadata, documentation, `doctor` and the build agree on the supported torch versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import PATIENCE_S
from ub_overlap import _versions
from ub_overlap.cli import doctor

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/guide").glob("*.md"))]
FACTS: dict[str, Any] = {
    "ub_overlap": "0.1.0",
    "system": {"shm_free": 1 << 30},
    "store": {"folder": "/cache"},
    "nvidia_smi": {"gpus": []},
    "environment": {},
    "probe": {
        "devices": {"count": 0, "names": [], "peers": []},
        "extension": {"version": "0.1.0", "cuda": False, "cuda_note": "no toolkit"},
        "private_names": {"missing": []},
        "profile": {"name": "cpu"},
    },
}


@pytest.mark.parametrize(
    ("version", "supported"),
    [("2.10.1", False), ("2.11.0+cu130", True), ("2.13.0", True), ("2.15.1.dev20260901", True), ("2.16.0a0+git1", False),
     ("3.11.0", False), ("1.13.1", False), ("unknown", False)],
)  # fmt: skip
def test_supported_versions(version: str, supported: bool) -> None:
    assert _versions.is_supported_torch(version) is supported


def test_metadata_states_the_range() -> None:
    for requirements in (PYPROJECT["tool"]["ub_overlap"]["dependencies"], PYPROJECT["build-system"]["requires"]):
        assert [r for r in requirements if re.match(r"torch\b", r)] == [_versions.REQUIREMENT]


def test_pages_state_the_range() -> None:
    """Every range of torch versions in README and guide is the supported one, and the pages for installing have it."""
    stated = {page.name: set(re.findall(r"torch (\d\.\d+ to \d\.\d+)", " ".join(page.read_text().split()))) for page in PAGES}
    assert {name: ranges for name, ranges in stated.items() if ranges - {_versions.SUPPORTED_TORCH}} == {}
    for name in ("README.md", "installation.md", "getting_started.md"):
        assert stated[name] == {_versions.SUPPORTED_TORCH}, name


@pytest.mark.parametrize(("version", "works"), [("2.10.0", False), ("2.11.0", True), ("2.15.0+cu132", True), ("2.16.0", False)])
def test_doctor_knows_the_range(version: str, works: bool) -> None:
    facts = {**FACTS, "probe": {**FACTS["probe"], "torch": {"version": version}}}
    (verdict,) = [v for v in doctor.verdicts(facts) if v.what == "this torch"]
    assert verdict.works is works
    assert _versions.SUPPORTED_TORCH in verdict.why
    assert works or _versions.REQUIREMENT in verdict.fix


# --- the build refuses what it cannot do, before anything is compiled -------------------------------------------------------

CPP_EXTENSION = """
CUDA_HOME = {home!r}
def get_cxx_compiler():
    import os
    return os.environ.get("CXX", "c++")
def include_paths(device_type="cpu"):
    return [CUDA_HOME + "/include"] if device_type == "cuda" else []
"""


def refuse(stub: Path, **environment: str) -> str:
    """Return what `setup.py build_ext` says on stderr with the torch of the folder `stub`; it must fail."""
    command = [sys.executable, str(ROOT / "setup.py"), "-q", "build_ext", "--build-lib", str(stub / "out")]
    env = {**os.environ, "PYTHONPATH": str(stub), "PYTHONSAFEPATH": "1", **environment}
    env.pop("CUDA_HOME", None)
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode != 0
    return done.stderr


def stub_torch(folder: Path, version: str, *, cuda: str | None = None, home: str | None = None) -> Path:
    """Write a package `torch` of this version into `folder`, with what setup.py reads from it."""
    (folder / "torch/utils").mkdir(parents=True)
    namespace = f"import types; version = types.SimpleNamespace(cuda={cuda!r})"
    (folder / "torch/__init__.py").write_text(f"__version__ = {version!r}\n{namespace}\n")
    (folder / "torch/utils/__init__.py").touch()
    (folder / "torch/utils/cpp_extension.py").write_text(CPP_EXTENSION.format(home=home))
    return folder


@pytest.mark.tier("test")
@pytest.mark.parametrize("version", ["2.10.0+cu128", "2.16.0"])
def test_build_refuses_an_unsupported_torch(version: str, tmp_path: Path) -> None:
    (line,) = refuse(stub_torch(tmp_path, version)).splitlines()
    assert f"got torch {version}" in line and f"expected torch {_versions.SUPPORTED_TORCH}" in line


@pytest.mark.tier("test")
def test_build_without_torch_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    (line,) = refuse(tmp_path).splitlines()
    assert f"the build needs torch {_versions.SUPPORTED_TORCH}" in line


@pytest.mark.tier("test")
def test_requested_cuda_without_headers_fails_in_one_line(tmp_path: Path) -> None:
    """An nvcc alone is not a toolkit: torch guesses CUDA_HOME from its folder, where the headers are missing."""
    nvcc = tmp_path / "home/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    stub = stub_torch(tmp_path, "2.13.0+cu130", cuda="13.0", home=str(tmp_path / "home"))
    (line,) = refuse(stub, UB_OVERLAP_BUILD_CUDA="1").splitlines()
    assert re.search(r"UB_OVERLAP_BUILD_CUDA=1, but CUDA_HOME is not set, .* has no header \w+\.h", line)


@pytest.mark.tier("test")
def test_requested_cuda_with_a_cpu_torch_fails_in_one_line(tmp_path: Path) -> None:
    (line,) = refuse(stub_torch(tmp_path, "2.13.0+cpu"), UB_OVERLAP_BUILD_CUDA="1").splitlines()
    assert "torch 2.13.0+cpu is a build without CUDA" in line


@pytest.mark.tier("test")
def test_a_build_without_a_compiler_fails_in_one_line(tmp_path: Path) -> None:
    (line,) = refuse(stub_torch(tmp_path, "2.13.0+cpu"), CXX="no-such-compiler").splitlines()
    assert "needs a C++ compiler, and no-such-compiler is not on PATH: apt install g++" in line


@pytest.mark.tier("test")
def test_an_old_setuptools_is_named(tmp_path: Path) -> None:
    """setuptools 65, which Python 3.11 puts into new environments, fails on pyproject.toml with a page of text."""
    (tmp_path / "setuptools.py").write_text("__version__ = '65.5.0'")
    (line,) = refuse(stub_torch(tmp_path, "2.13.0")).splitlines()
    assert "got setuptools 65.5.0, expected 77 or later" in line
