"""Decide whether the CUDA sources are built, and say why or why not, before anything is compiled."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_TOOLKIT_HEADER = re.compile(r"#\s*include\s*<(cu\w+\.h)>")
_MISSING = re.compile(r"fatal error: '?([\w./+-]+)'?(?::| file)")


@dataclass(frozen=True)
class TorchCuda:
    """What torch and torch.utils.cpp_extension know about CUDA."""

    version: str
    """Version of torch."""
    cuda: str | None
    """Version of its CUDA, None for a build without CUDA."""
    home: str | None
    """cpp_extension.CUDA_HOME: $CUDA_HOME, else the folder above the nvcc on PATH, else /usr/local/cuda."""
    include: Sequence[str] = ()
    """Include folders of a CUDA extension."""


def toolkit_headers(sources: Iterable[Path]) -> list[str]:
    """Return the headers of the CUDA toolkit that `sources` include, e.g. "cublasLt.h"."""
    return sorted({name for path in sources for name in _TOOLKIT_HEADER.findall(path.read_text())})


def find_missing_header(headers: Sequence[str], include: Sequence[str]) -> str:
    """Return the first header that the C++ compiler does not find, directly or through another one; "" if all are there.

    RuntimeError with the compiler's first message if it fails for another reason."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "headers.cpp")
        source.write_text("".join(f"#include <{name}>\n" for name in headers))
        command = [*compiler, "-E", *(f"-I{path}" for path in include), "-o", os.devnull, str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
        except OSError as error:
            raise RuntimeError(f"the C++ compiler {compiler[0]!r} does not start: {error.strerror}") from None
    if done.returncode == 0:
        return ""
    missing = _MISSING.search(done.stderr)
    if missing is None:
        raise RuntimeError(next((line for line in done.stderr.splitlines() if "error" in line), f"{compiler[0]} failed"))
    return missing.group(1)


def nvcc_release(nvcc: Path) -> str:
    """Return the release of a CUDA compiler, e.g. "13.0"; "" if it does not run."""
    try:
        done = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    return release.group(1) if done.returncode == 0 and release else ""


def find_problem(torch: TorchCuda, headers: Sequence[str]) -> str:
    """Return in one line why CUDA sources with these toolkit headers cannot be compiled for this torch; "" if they can."""
    if torch.cuda is None:
        return f"torch {torch.version} is a build without CUDA"
    if not torch.home:
        return f"no nvcc found in CUDA_HOME, PATH or /usr/local/cuda: install the CUDA {torch.cuda} toolkit"
    variable = next((name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), "")
    home = f"{variable}={torch.home}" if variable else f"CUDA_HOME is not set, and torch's guess {torch.home}"
    nvcc = Path(torch.home, "bin", "nvcc")
    release = nvcc_release(nvcc)
    if not release:
        return f"{home} has no working bin/nvcc: set CUDA_HOME to the CUDA {torch.cuda} toolkit"
    if release.split(".")[0] != torch.cuda.split(".")[0]:
        return f"{nvcc} is CUDA {release} and torch {torch.version} is built for CUDA {torch.cuda}: the major versions differ"
    try:
        missing = find_missing_header(headers, torch.include)
    except RuntimeError as error:
        return f"the headers of the CUDA toolkit cannot be checked: {error}"
    if missing:
        return f"{home} has no header {missing}: set CUDA_HOME to a complete CUDA {torch.cuda} toolkit"
    return ""


def decide(requested: str, torch: TorchCuda, headers: Sequence[str]) -> tuple[bool, str]:
    """Return whether CUDA is built, and why in one line. `requested`: UB_OVERLAP_BUILD_CUDA.

    SystemExit with that line if "1" was requested and CUDA cannot be built, or for another value than auto, 0 and 1."""
    if requested not in ("auto", "0", "1"):
        raise SystemExit(f"ub_overlap: UB_OVERLAP_BUILD_CUDA={requested!r}: expected auto, 0 or 1")
    if requested == "0":
        return False, "UB_OVERLAP_BUILD_CUDA=0"
    problem = find_problem(torch, headers)
    if problem and requested == "1":
        raise SystemExit(f"ub_overlap: UB_OVERLAP_BUILD_CUDA=1, but {problem}")
    if problem:
        return False, problem
    return True, f"nvcc {nvcc_release(Path(str(torch.home), 'bin', 'nvcc'))} in {torch.home}, torch for CUDA {torch.cuda}"
