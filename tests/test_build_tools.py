"""Tests of build_tools: whether CUDA is built and why, the README of a package index, versions of wheels."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from build_tools import cuda_toolkit, index_readme, sanitize, wheels

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ["cublasLt.h", "cuda_runtime_api.h"]


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home of a CUDA 13.0 toolkit with an nvcc and the headers."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "bin/nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    (tmp_path / "bin/nvcc").chmod(0o755)
    for name in HEADERS:
        (tmp_path / "include" / name).write_text("#pragma once\n")
    return tmp_path


def torch_with(home: Path | None, cuda: str | None = "13.0") -> cuda_toolkit.TorchCuda:
    version = "2.13.0+cpu" if cuda is None else "2.13.0+cu" + cuda.replace(".", "")
    include = [str(home / "include")] if home else []
    return cuda_toolkit.TorchCuda(version=version, cuda=cuda, home=str(home) if home else None, include=include)


def test_headers_are_read_from_the_sources() -> None:
    headers = cuda_toolkit.toolkit_headers((ROOT / "csrc/cuda").glob("*.*"))
    assert {"cublasLt.h", "cuda_runtime_api.h"} <= set(headers)
    assert not [name for name in headers if not name.startswith("cu")]


@pytest.mark.tier("test")
def test_a_complete_toolkit(toolkit: Path) -> None:
    built, note = cuda_toolkit.decide("auto", torch_with(toolkit), HEADERS)
    assert built
    assert "nvcc 13.0" in note and "torch for CUDA 13.0" in note
    assert cuda_toolkit.decide("0", torch_with(toolkit), HEADERS) == (False, "UB_OVERLAP_BUILD_CUDA=0")


@pytest.mark.tier("test")
def test_a_newer_minor_version_of_nvcc_is_fine(toolkit: Path) -> None:
    assert cuda_toolkit.find_problem(torch_with(toolkit, "13.2"), HEADERS) == ""


@pytest.mark.tier("test")
def test_missing_headers_are_named(toolkit: Path) -> None:
    """Directly included or through another header: the compiler looks for both."""
    (toolkit / "include/cublasLt.h").write_text("#include <library_types.h>\n")
    assert "has no header library_types.h" in cuda_toolkit.find_problem(torch_with(toolkit), HEADERS)
    (toolkit / "include/cublasLt.h").unlink()
    assert "has no header cublasLt.h" in cuda_toolkit.find_problem(torch_with(toolkit), HEADERS)


@pytest.mark.tier("test")
def test_headers_elsewhere_count(toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPATH adds folders for the compiler, e.g. the headers of NVIDIA's pip packages."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (toolkit / "include/cublasLt.h").rename(elsewhere / "cublasLt.h")
    assert "cublasLt.h" in cuda_toolkit.find_problem(torch_with(toolkit), HEADERS)
    monkeypatch.setenv("CPATH", str(elsewhere))
    assert cuda_toolkit.find_problem(torch_with(toolkit), HEADERS) == ""


@pytest.mark.tier("test")
def test_why_not(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reason is one line that names what is missing."""
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    reasons = {
        "torch 2.13.0+cpu is a build without CUDA": torch_with(toolkit, None),
        "no nvcc found": torch_with(None),
        "the major versions differ": torch_with(toolkit, "12.8"),
    }
    (toolkit / "include/cublasLt.h").unlink()
    reasons[f"CUDA_HOME={toolkit} has no header cublasLt.h"] = torch_with(toolkit)
    for expected, torch in reasons.items():
        built, note = cuda_toolkit.decide("auto", torch, HEADERS)
        assert not built and expected in note and "\n" not in note
        with pytest.raises(SystemExit, match=re.escape(f"ub_overlap: UB_OVERLAP_BUILD_CUDA=1, but {note}")):
            cuda_toolkit.decide("1", torch, HEADERS)
    (toolkit / "bin/nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert "has no working bin/nvcc" in cuda_toolkit.find_problem(torch_with(toolkit), HEADERS)


def test_unknown_request(toolkit: Path) -> None:
    with pytest.raises(SystemExit, match="UB_OVERLAP_BUILD_CUDA='yes': expected auto, 0 or 1"):
        cuda_toolkit.decide("yes", torch_with(toolkit), HEADERS)


# --- README of a package index ----------------------------------------------------------------------------------------------

TARGET = re.compile(r"\]\(([^)\s]+)\)")


def test_readme_without_a_repository_has_no_relative_target() -> None:
    text = index_readme.rewrite((ROOT / "README.md").read_text(), "", "v1")
    assert [target for target in TARGET.findall(text) if not target.startswith("https://")] == []
    assert "![" not in text
    assert "[reason]" not in text and "reason" in text


def test_readme_with_a_repository_points_there() -> None:
    text = index_readme.rewrite((ROOT / "README.md").read_text(), "https://host/org/name", "v1")
    targets = TARGET.findall(text)
    assert "https://host/org/name/raw/v1/docs/data/graph_diff.png" in targets
    assert "https://host/org/name/blob/v1/docs/index.md" in targets
    assert [target for target in targets if not target.startswith("https://host/org/name/")] == []
    for target in targets:
        assert (ROOT / target.split("/v1/")[1].partition("#")[0]).exists(), target


def test_absolute_targets_stay() -> None:
    text = "[a](https://x/y) ![b](https://x/z.png) [c](#here)"
    assert index_readme.rewrite(text, "", "v1") == text


# --- wheels -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "with_cuda", "expected"),
    [
        ("2.13.0+cpu", False, "torch2.13.0.cpu"),
        ("2.11.0+cu130", True, "torch2.11.0.cu130"),
        ("2.11.0+cu130", False, "torch2.11.0.cu130.nocuda"),
        ("2.15.0", False, "torch2.15.0.cpu"),
        ("2.15.0a0+git12-ab", True, "torch2.15.0a0.git12.ab"),
    ],
)
def test_local_versions(torch: str, with_cuda: bool, expected: str) -> None:
    assert wheels.local_version(torch, with_cuda=with_cuda) == expected


def test_nothing_to_build_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        wheels.main([])
    assert caught.value.code == 2
    assert "--torch VERSION or --interpreter PYTHON" in capsys.readouterr().err


def test_a_failed_wheel_is_reported_and_the_others_are_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def build(sdist: Path, python: Path, output: Path, cuda: str) -> Path:
        if python.name == "bad":
            raise wheels.BuildError("no torch there")
        return output / f"{python.name}.whl"

    monkeypatch.setattr(wheels, "build_wheel", build)
    monkeypatch.setattr(wheels, "build_sdist", lambda folder: folder / "sdist.tar.gz")
    code = wheels.main(["--interpreter", "bad", "--interpreter", "good", "--output", str(tmp_path)])
    streams = capsys.readouterr()
    assert code == 1
    assert "bad: no torch there" in streams.err
    assert f"wheel  {tmp_path}/good.whl" in streams.out


@pytest.mark.tier("test")
def test_a_missing_interpreter_does_not_stop_the_other_wheels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    build = wheels.build_wheel

    def build_or_pretend(sdist: Path, python: Path, output: Path, cuda: str) -> Path:
        return output / "good.whl" if python.name == "good" else build(sdist, python, output, cuda)

    monkeypatch.setattr(wheels, "build_wheel", build_or_pretend)
    monkeypatch.setattr(wheels, "build_sdist", lambda folder: folder / "sdist.tar.gz")
    missing = str(tmp_path / "no/python")
    assert wheels.main(["--interpreter", missing, "--interpreter", "good", "--output", str(tmp_path)]) == 1
    streams = capsys.readouterr()
    assert f"{missing}: " in streams.err and f"wheel  {tmp_path}/good.whl" in streams.out


def test_a_wheel_is_moved_to_another_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: Sequence[str | Path], **_: object) -> str:
        if "wheel" in command:
            (Path(command[command.index("-w") + 1]) / "x.whl").write_bytes(b"wheel")
        return '["2.13.0+cpu", null]'

    def cross_device(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(wheels, "run", run)
    monkeypatch.setattr(wheels, "check_wheel", lambda *_, **__: None)
    monkeypatch.setattr(os, "rename", cross_device)
    monkeypatch.setattr(os, "replace", cross_device)
    wheel = wheels.build_wheel(tmp_path / "sdist.tar.gz", Path("python"), tmp_path, "auto")
    assert wheel == tmp_path / "x.whl" and wheel.read_bytes() == b"wheel"


def test_files_that_sanitizers_run_exist() -> None:
    files = [Path(ROOT, text.removeprefix("--deselect=").partition("::")[0]) for text in sanitize.TESTS]
    assert len(files) > 9 and [file for file in files if not file.is_file()] == []
