"""New rank processes, for tests that kill, stop or abandon ranks. `tests/harness` has the pools for other tests.

    outcomes = observe_ranks("tests.runtime.rank_failures:dies", 3, args=(1,))

Every rank is a new process with a gloo world. The Store is in the caller, so that it survives the death of any rank. All
processes have ended when `observe_ranks` returns.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.harness.processes import READ_AT_IMPORT, kill_process, start_process
from tests.harness.ranks import PATIENCE_S


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: the value it returned, the name and text of what it raised, or neither (killed or still running)."""

    rank: int
    value: Any = None
    error: str = ""
    text: str = ""
    seconds: float = 0.0
    ended: bool = False


def observe_ranks(
    function: str, world: int, args: tuple[Any, ...] = (), timeout: float = PATIENCE_S, wait_for: Sequence[int] = ()
) -> list[Outcome]:
    """Run "module:function"(rank, world, *args) on every rank. `wait_for`: the ranks that must end, () for all."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            start_process(rank, _run_rank, (folder, store.port, world, function, args, rank), {**os.environ, **READ_AT_IMPORT})
            for rank in range(world)
        ]
        try:
            deadline = time.monotonic() + timeout
            for rank in wait_for or range(world):
                ranks[rank].join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                kill_process(process)
        return [_read(Path(folder, str(rank)), rank) for rank in range(world)]


def _read(file: Path, rank: int) -> Outcome:
    return pickle.loads(file.read_bytes()) if file.exists() else Outcome(rank)


def _run_rank(folder: str, port: int, world: int, function: str, args: tuple[Any, ...], rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_S))
    store.set(f"joined/{rank}", "")  # a rank that returns at once would close connections that others still set up
    store.wait([f"joined/{r}" for r in range(world)])
    module, _, name = function.partition(":")
    begin = time.monotonic()
    try:
        value = getattr(importlib.import_module(module), name)(rank, world, *args)
        outcome = Outcome(rank, value=value, ended=True)
    except BaseException as error:  # noqa: BLE001  (every error is reported to the caller)
        outcome = Outcome(
            rank,
            error=type(error).__name__,
            text=str(error),
            seconds=getattr(error, "seconds", time.monotonic() - begin),
            ended=True,
        )
    file = Path(folder, str(rank))
    file.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    file.with_suffix(".part").rename(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
