"""A process that has imported torch, and forks one for each run of pytest: without it, imports take most of the time.

It imports nothing of ub_overlap, so each run imports the package as it is then. Ranks come from the servers of
tests/harness/processes.py, which all runs share: they have not imported it either. Started by runs.py, as a script:

    {"arguments": [...], "limit_s": 420, "output": path}        a line on stdin, in
    {"code": 0}                                                 a line on stdout; null where it took longer
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

READ_AT_IMPORT = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CXX": os.path.abspath("tests/harness/bin/g++"),
}
"""What tests/conftest.py sets before torch is imported."""
PRELOADED = ("torch", "torch.distributed.tensor.parallel", "torch._inductor.compile_fx", "pytest", "hypothesis", "networkx")


def main() -> None:
    sys.path[0] = os.getcwd()  # not the folder of this file
    os.environ.update(READ_AT_IMPORT)
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    start_rank_servers()
    assert not any(name == "ub_overlap" or name.startswith("ub_overlap.") for name in sys.modules)
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"code": run(asked["arguments"], asked["limit_s"], asked["output"])}), flush=True)


def start_rank_servers() -> None:
    """Start the servers that ranks are forked from. They stay as they are in forked processes, whose children they are not."""
    processes: Any = importlib.import_module("tests.harness.processes")
    for server in getattr(processes, "_servers", ()):
        with processes._use_server(server):
            pass
        server.ensure_running = lambda: None


def run(arguments: Sequence[str], limit_s: float, output: str) -> int | None:
    """Run pytest in a forked process. Return its exit code, None after `limit_s`."""
    pid = os.fork()
    if pid == 0:
        _run_pytest(arguments, output)
    signal.signal(signal.SIGTERM, lambda *_: (_kill(pid), os._exit(1)))  # it is in a session of its own
    end = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            _kill(pid)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.05)


def _kill(pid: int) -> None:
    """Kill a run of pytest. Its ranks end when they find their pipes closed."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _run_pytest(arguments: Sequence[str], output: str) -> None:
    """Run pytest, and end this process as Python ends."""
    code = 3
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        import pytest

        code = int(pytest.main(list(arguments)))
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
