"""Starts the programs of this folder as processes of their own, with a limit, and reads their tables. Imports no torch.

done = torchrun("races.py", 4, ["--quick"], limit_s=120)
done.code, done.table(), done.tail()
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "gpu" / "programs"
ENVIRONMENT = {
    # NVLink multicast is never used here.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
}
TABLE = "== "  # as frame.py begins a table


@dataclass(frozen=True)
class Done:
    """How a program ended. code: None if it outlasted its limit and was killed."""

    command: str
    code: int | None
    output: str
    seconds: float

    def table(self) -> str:
        """Its table; "" where it printed none."""
        at = self.output.rfind(f"\n{TABLE}")
        lines = self.output[at + 1 :].splitlines() if at >= 0 else []
        # The table ends where whatever the launcher says begins.
        noise = ("Traceback", "E1", "W1", "E0", "W0", "[rank", "====", "*****", "torch.distributed")
        end = next((i for i, line in enumerate(lines) if i and line.startswith(noise)), len(lines))
        return "\n".join(lines[:end]).rstrip()

    def tail(self, lines: int = 60) -> str:
        return self.table() or "\n".join(self.output.splitlines()[-lines:])

    def why(self) -> str:
        ended = "outlasted its limit" if self.code is None else f"exit code {self.code}"
        return f"{ended} after {self.seconds:.0f} s"


def torchrun(
    program: str, ranks: int, arguments: Sequence[str] = (), limit_s: float = 300, env: dict[str, str] | None = None
) -> Done:
    """`program` of this folder on `ranks` local ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run([*launcher, str(PROGRAMS / program), *arguments], limit_s, env)


def python(program: str, arguments: Sequence[str] = (), limit_s: float = 300, env: dict[str, str] | None = None) -> Done:
    """`program` of this folder, which starts its ranks by itself."""
    return run([sys.executable, str(PROGRAMS / program), *arguments], limit_s, env)


def run(command: Sequence[str], limit_s: float, env: dict[str, str] | None = None) -> Done:
    """Runs a command from the tree's root. Whatever happens, it and all that it started are gone at the end."""
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
    return Done(" ".join(command), code, output, time.monotonic() - began)


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, then SIGKILL to it and to all that it started: torchrun's ranks live in sessions of their own."""
    family = _descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for pid in [*_descendants(process.pid), *family, process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found
