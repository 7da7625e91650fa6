"""Processes of ranks, forked from servers that have imported torch.

    process = start_process(rank, function, args, environment={**os.environ, "OMP_NUM_THREADS": "1"})

The import of torch, Dynamo and Inductor takes 5 s of CPU. Each rank would take it again, also one that a test kills at once.
The servers are multiprocessing's: they have one thread, no group and no device, and have not imported ub_overlap. So their
children are like new processes to torch and to us, but for the seed of hashes. There are two servers, so that neighbouring
ranks have different seeds: what ranks decide must not depend on the order of a set.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import torch

PRELOADED = ["torch", "torch.distributed.tensor.parallel", "tests.harness.probed_inductor"]
PRELOADED_WITH_CUDA = ["torch"]  # Inductor counts GPUs when it is imported, and then torch refuses CUDA in forked processes
READ_AT_IMPORT = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Variables that torch reads when it is imported: the same in all processes of ranks, whatever `environment` holds."""
_servers = (forkserver.ForkServer(), forkserver.ForkServer())
_starting = threading.Lock()


def start_process(
    rank: int, function: Callable[..., None], args: tuple[Any, ...], environment: Mapping[str, str]
) -> BaseProcess:
    """Run a function of a module in a new process, in a session of its own and with no variables but `environment`."""
    process = multiprocessing.get_context("forkserver").Process(target=_enter, args=(function, args, dict(environment)))
    with _starting, _use_server(_servers[rank % len(_servers)]):  # the fault matrix starts ranks from several threads
        process.start()
    return process


def kill_process(process: BaseProcess) -> None:
    """Kill a process and all that it started."""
    pid = process.pid or 0
    for kill in (os.killpg, os.kill):  # it may not have its own session yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    process.join(10)


@contextlib.contextmanager
def _use_server(server: forkserver.ForkServer) -> Iterator[None]:
    """Let multiprocessing fork from `server`, started if need be, and not from the one that it has for all."""
    with mock.patch.dict(os.environ, READ_AT_IMPORT):
        server.set_forkserver_preload(PRELOADED_WITH_CUDA if torch.version.cuda else PRELOADED)
        server.ensure_running()
    with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        yield


def _enter(function: Callable[..., None], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the server has looked up its own
    gc.freeze()  # half a million objects of torch: without it, a tenth of a compilation is spent on looking through them
    function(*args)
