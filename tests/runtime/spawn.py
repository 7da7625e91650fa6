"""New rank processes, for tests that kill, stop or abandon ranks. `tests/harness` has the pools for other tests.

    outcomes = run_ranks("tests.runtime.rank_failures:dies", 3, args=(1,), timeout=40)

Every rank is a new process with a gloo world. The Store is in the caller, so that it survives the death of any rank. All
processes have ended when `run_ranks` returns.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: the value it returned, the name and text of what it raised, or neither (killed or still running)."""

    rank: int
    value: Any = None
    error: str = ""
    text: str = ""
    seconds: float = 0.0
    ended: bool = False


def run_ranks(
    function: str, world: int, args: tuple[Any, ...] = (), timeout: float = 60, wait_for: Sequence[int] = ()
) -> list[Outcome]:
    """Run "module:function"(rank, world, *args) on every rank. `wait_for`: the ranks that must end, () for all."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.runtime.spawn", folder, str(store.port), str(world), function, repr(args)]
        ranks = [
            subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, start_new_session=True) for rank in range(world)
        ]
        try:
            deadline = time.monotonic() + timeout
            for rank in wait_for or range(world):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ranks[rank].wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        return [_read(Path(folder, str(rank)), rank) for rank in range(world)]


def _read(file: Path, rank: int) -> Outcome:
    return pickle.loads(file.read_bytes()) if file.exists() else Outcome(rank)


def _main(folder: str, port: str, world: str, function: str, args: str, rank: str) -> None:
    import ast

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    me, size = int(rank), int(world)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=me, world_size=size, timeout=timedelta(seconds=60))
    module, _, name = function.partition(":")
    begin = time.monotonic()
    try:
        outcome = Outcome(
            me, value=getattr(importlib.import_module(module), name)(me, size, *ast.literal_eval(args)), ended=True
        )
    except BaseException as error:  # noqa: BLE001  (every error is reported to the caller)
        outcome = Outcome(
            me,
            error=type(error).__name__,
            text=str(error),
            seconds=getattr(error, "seconds", time.monotonic() - begin),
            ended=True,
        )
    file = Path(folder, rank)
    file.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    file.with_suffix(".part").rename(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    from tests.runtime.spawn import _main as main

    main(*sys.argv[1:])
