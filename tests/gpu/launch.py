"""Start processes with a limit and collect their output; start torchrun on a test module. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ub_overlap.cli.process_tree import find_descendants, kill

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    # No test uses NVLink multicast.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Finished:
    """The result of a process. `code`: None if it exceeded its limit and was killed."""

    command: str
    code: int | None
    output: str
    seconds: float

    def tail(self, lines: int = 80) -> str:
        return "\n".join(self.output.splitlines()[-lines:])

    def why(self) -> str:
        ended = "outlasted its limit" if self.code is None else f"exit code {self.code}"
        return f"{self.command}: {ended} after {self.seconds:.0f} s"


def torchrun(ranks: int) -> list[str]:
    """Return the start of a command that runs a program on `ranks` ranks of this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def torchrun_command(
    module: str, ranks: int, arguments: Sequence[str] = (), python: Sequence[str] = (), all_output: bool = False
) -> list[str]:
    """Return the command that runs pytest on a module of tests/gpu/torchrun on `ranks` local ranks.

    `python`: the interpreter and its wrapper command, such as a sanitizer. `all_output`: of all ranks, else of rank 0.
    """
    interpreter = ["--no-python", *(python or [sys.executable])]
    shown = [] if all_output else ["--local-ranks-filter", "0"]
    return [*torchrun(ranks), *shown, *interpreter, "-m", "pytest", *pytest_arguments(module, arguments)]


def pytest_arguments(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the arguments of pytest for a module of tests/gpu/torchrun."""
    # Only Python's output is captured: the stacks of a rank that dies are seen.
    fixed = ["-p", "no:cacheprovider", "--capture=sys", "-q", "-rfEs"]
    return [*fixed, str(ROOT / "tests/gpu/torchrun" / module), *arguments]


def launch(command: Sequence[str], limit_s: float, env: dict[str, str] | None = None) -> Finished:
    """Run a command from the repository root. Its whole process tree is dead when this returns."""
    began = time.monotonic()
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: int | None = None
    try:
        output, _ = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
    except BaseException:
        _end(process)
        raise
    return Finished(" ".join(command), code, output, time.monotonic() - began)


def _end(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM, then SIGKILL to the process tree. torchrun's ranks run in separate sessions."""
    family = find_descendants([process.pid])
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    kill(family | find_descendants([process.pid]))
    process.kill()
