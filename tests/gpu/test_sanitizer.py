"""compute-sanitizer over our kernels: memcheck, racecheck (shared memory) and synccheck, each on two ranks with tiny shapes.

Only kernels with "ub_overlap" in their name are checked, if the installed version can filter. Every rank runs under its own
sanitizer, and each summary must be clean. A control with an out-of-bounds write shows that the tool detects errors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.launch import ROOT, launch, torchrun_command

LIMIT_S = 240
BROKEN = "Internal Sanitizer Error"
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:errors?|hazards?)")


def sanitizer() -> str:
    """Return the path of the tool, or "" if it is not installed."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = [Path(home, "bin"), Path(home, "compute-sanitizer"), Path("/usr/local/cuda/bin")]
    return shutil.which("compute-sanitizer") or next(
        (str(p / "compute-sanitizer") for p in places if (p / "compute-sanitizer").exists()), ""
    )


def sanitized(tool: str) -> list[str]:
    """Return the command that runs another command under `tool`."""
    path = sanitizer()
    if not path:
        pytest.skip("compute-sanitizer is not installed")
    help_text = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60, check=False).stdout
    flags = ["--tool", tool]
    # The option's name depends on the version. Without it all kernels are checked.
    for name in ("--kernel-name", "--kernel-regex", "--filter"):
        if f"{name} " in help_text or f"{name}=" in help_text:
            flags += [name, "kns=ub_overlap"]
            break
    if tool == "memcheck" and "--report-api-errors" in help_text:
        flags += ["--report-api-errors", "no"]  # torch probes the driver with calls that fail
    return [path, *flags, sys.executable]


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT_S + 30)
def test_memcheck_finds_a_wrong_kernel(ranks: int) -> None:
    process = launch([*sanitized("memcheck"), str(ROOT / "tests/gpu/sanitizer_control.py")], LIMIT_S)
    found = sum(map(int, SUMMARY.findall(process.output)))
    if process.code == 3 and not found:
        pytest.skip("this torch compiles no kernels")
    assert found, process.output[-4000:]


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    "tool", ["memcheck", pytest.param("racecheck", marks=pytest.mark.full), pytest.param("synccheck", marks=pytest.mark.full)]
)
def test_kernels(ranks: int, tool: str) -> None:
    command = torchrun_command("test_kernels.py", 2, python=sanitized(tool), all_output=True)
    process = launch(command, LIMIT_S, {"UB_OVERLAP_TEST_NCCL": "0", "UB_OVERLAP_TEST_STEP_TIMEOUT_S": "150"})
    if BROKEN in process.output:  # racecheck of CUDA 13.0, at the first kernel that touches memory that ranks share
        pytest.skip(f"the sanitizer itself failed: {BROKEN}")
    summaries = [int(n) for n in SUMMARY.findall(process.output)]
    lines = "\n".join(line for line in process.output.splitlines() if line.startswith("====="))
    assert process.code == 0 and len(summaries) >= 2 and not any(summaries), f"{lines[:6000]}\n{process.tail()}"
