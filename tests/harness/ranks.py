"""Pools of gloo ranks: long-lived processes that run functions of tests.

    pool = RankPool(2)
    results = pool.run(function, *args)  # function(rank, world, *args) on each rank -> [of rank 0, of rank 1]
    pool.close()

A rank that dies, hangs, fails alone or breaks a group ends the pool: all its processes are killed, and the next run starts
new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.harness.processes import READ_AT_IMPORT, kill_process, start_process

PATIENCE_S = 280.0
"""Seconds for a call of all ranks, or for a program, much more than any takes: CI has made 20 seconds take over 100."""
WAIT_S = 270
"""Deadline of the waits within a call, in seconds. It ends first, as its error says more."""
SETTINGS = {
    **READ_AT_IMPORT,
    # Of a plan that ranks have compiled before they compare no digests again, so the first call waits for compilers.
    "UB_OVERLAP_STEP_TIMEOUT_S": str(WAIT_S),
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
GRACE = 5.0  # seconds for the other ranks to finish after one has failed


class RankError(RuntimeError):
    """One or more ranks raised. `failures` maps rank -> (exception type name, message, traceback text).

    Ranks that raised the same type in the same place are named together: one traceback, and the messages that differ.
    `stacks`: of the ranks that had not finished, and what all had run before: one of these may have left the group out of step.
    """

    def __init__(self, world: int, failures: dict[int, tuple[str, str, str]], unfinished: list[int], stacks: str) -> None:
        self.failures = failures
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank, (name, _, text) in sorted(failures.items()):
            frames = [line for line in text.splitlines() if line.startswith("  File ")]
            alike.setdefault((name, *frames), []).append(rank)
        parts = []
        for ranks in alike.values():
            name, message, text = failures[ranks[0]]
            parts.append(f"{_ranks_of(ranks, world)} raised {name}:\n{text}")
            parts += [f"rank {rank}: {failures[rank][1]}" for rank in ranks[1:] if failures[rank][1] != message]
        if unfinished:
            parts.append(f"ranks {unfinished} did not finish within {GRACE:g} s after that and were killed\n{stacks}")
        super().__init__("\n".join(parts))


def _ranks_of(ranks: list[int], world: int) -> str:
    return f"rank {ranks[0]} of {world}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} of {world} each"


class RankDied(RuntimeError):
    """A rank's process ended while it ran a function.

    The text holds its stacks, after a signal such as SIGSEGV or SIGABRT, and all functions that the process had run before: one
    of them may have corrupted its heap.
    """


class RankTimeout(TimeoutError):
    """A function did not end on all ranks in time. The text holds the stacks of ranks that had not finished."""


@dataclass(frozen=True)
class _Job:
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: list[str]
    env: dict[str, str]
    keep_graphs: bool


def name_of(function: Callable[..., Any] | str) -> str:
    """Return "module:qualified.name" of a function that a new process can import."""
    if isinstance(function, str):
        return function
    if "<" in function.__qualname__ or function.__module__ == "__main__":
        raise ValueError(f"ranks import functions by name; {function.__module__}.{function.__qualname__} cannot be imported")
    return f"{function.__module__}:{function.__qualname__}"


def _resolve(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _settings() -> Any:
    """Return the settings of ub_overlap in this process, None where none were read."""
    module = sys.modules.get("ub_overlap.runtime.settings")
    return module._Holder.settings if module else None


def _restore_settings(before: Any) -> None:
    """Put the settings back that a job has changed: the next one must not inherit a deadline of 2 s."""
    module = sys.modules.get("ub_overlap.runtime.settings")
    if module and module.current() != (wanted := before or module.from_environment()):
        module.keep(wanted)
        module.apply()


def forget_meshes() -> None:
    """Empty DTensor's caches: they would give the meshes of earlier jobs to later ones, whose own are equal, but not the same.

    AOTAutograd tells meshes apart by identity, and may then take that of a result for that of a tangent.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


def _run_job(job: _Job, rank: int, world: int) -> Any:
    import torch

    sys.path[:] = job.path
    settings = _settings()
    previous = {key: os.environ.get(key) for key in job.env}
    os.environ.update(job.env)
    if "torch._dynamo" in sys.modules and not job.keep_graphs:
        torch._dynamo.reset()
    forget_meshes()
    torch.manual_seed(0)
    random.seed(0)
    try:
        return _resolve(job.function)(rank, world, *job.args, **job.kwargs)
    finally:
        for key, value in previous.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        _restore_settings(settings)


def _broke_a_group(error: BaseException) -> bool:
    """Return whether an error, or what it was raised from, leaves a group that later calls cannot use."""
    if "ub_overlap.runtime.errors" not in sys.modules:
        return False
    from ub_overlap.runtime import errors

    kinds = (errors.RankError, errors.SessionPoisonedError, errors.GroupAbortedError)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kinds):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _serve(rank: int, world: int, port: int, timeout: float, folder: str, pipe: Connection) -> None:
    """Run one worker: join the world, then run jobs until the pipe closes."""
    stacks = Path(folder, f"stacks.{rank}").open("w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch
    import torch.distributed as dist

    from tests.harness.gloo_device import share_gloo_device

    os.dup2(stacks.fileno(), 2)  # torch prints its own stacks there: those of threads without Python too
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    share_gloo_device()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    pipe.send(("ready", None))
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            answer = pickle.dumps(("result", _run_job(job, rank, world)))
        except BaseException as error:  # noqa: BLE001 (every error is sent to the parent)
            failure = (type(error).__name__, str(error), traceback.format_exc())
            answer = pickle.dumps(("broken" if _broke_a_group(error) else "error", failure))
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pipe.send_bytes(answer)
        except OSError:  # the parent process has ended
            break
    os._exit(0)


class RankPool:
    """`world` processes with an initialized gloo world, started at the first run.

    `collective_timeout`: gloo's own timeout in seconds. `env`: added to the workers' environment.
    """

    def __init__(self, world: int, collective_timeout: float = WAIT_S, env: dict[str, str] | None = None) -> None:
        self.world = world
        self._collective_timeout = collective_timeout
        self._env = {**SETTINGS, **(env or {})}
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""
        self._store: Any = None
        self._names: list[str] = []  # of the functions that these processes have run
        atexit.register(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no worker runs."""
        return [process.pid for process in self._processes]

    def run(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout: float = PATIENCE_S,
        env: dict[str, str] | None = None,
        keep_graphs: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Return the results of `function(rank, world, *args, **kwargs)` by rank. `env` applies to this call only.

        `keep_graphs`: it uses what earlier runs compiled.
        `timeout`: seconds; RankTimeout after that, with the stacks of the ranks that are late.
        """
        name = name_of(function)
        job = pickle.dumps(_Job(name, args, kwargs, list(sys.path), env or {}, keep_graphs))
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send_bytes(job)
            answers = self._collect(timeout, name)
        except BaseException:
            self.close()
            raise
        failures = {rank: payload for rank, (kind, payload) in answers.items() if kind != "result"}
        unfinished = [rank for rank in range(self.world) if rank not in answers]
        stacks = f"{self._stacks(unfinished)}\n{self._run_before()}" if unfinished else ""
        self._names.append(name)
        if failures:
            in_step = len(failures) == self.world and len({failure[0] for failure in failures.values()}) == 1
            if not in_step or any(kind == "broken" for kind, _ in answers.values()):
                self.close()
            raise RankError(self.world, failures, unfinished, stacks)
        return [answers[rank][1] for rank in range(self.world)]

    def close(self) -> None:
        """Kill the workers and all processes that they started."""
        for process in self._processes:
            kill_process(process)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store, self._names = [], [], None, []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _start(self) -> None:
        import torch.distributed as dist

        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            ours, theirs = multiprocessing.Pipe()
            args = (rank, self.world, self._store.port, self._collective_timeout, self._folder, theirs)
            self._processes.append(start_process(rank, _serve, args, {**os.environ, **self._env}))
            theirs.close()
            self._pipes.append(ours)
        try:
            self._collect(PATIENCE_S, "start of the ranks")
        except BaseException:
            self.close()
            raise

    def _collect(self, timeout: float, what: str) -> dict[int, tuple[str, Any]]:
        """Return one answer per rank; fewer when a rank failed and others did not finish within GRACE."""
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while len(answers) < self.world:
            open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            if not ready and failed:
                return answers
            if not ready:
                late = list(open_pipes.values())
                raise RankTimeout(f"{what}: ranks {late} not done after {timeout:g} s\n{self._stacks(late)}")
            for pipe in ready:
                rank = open_pipes[pipe]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(1)
                    code = self._processes[rank].exitcode
                    end = f"the process of rank {rank} of {self.world} ended with code {code}"
                    raise RankDied(f"{what}: {end}\n{self._read_stacks([rank])}\n{self._run_before()}") from None
                if answers[rank][0] in ("error", "broken") and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        return answers

    def _run_before(self) -> str:
        return f"run before: {', '.join(self._names) or 'nothing'}"

    def _stacks(self, ranks: Any) -> str:
        """Return the Python stacks of all threads of ranks that are still running."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self._read_stacks(ranks)

    def _read_stacks(self, ranks: Any) -> str:
        """Return what ranks have written to stderr: stacks, on request or when a signal ended them, and warnings."""
        files = {rank: Path(self._folder, f"stacks.{rank}") for rank in ranks}
        return "\n".join(f"rank {rank}:\n{_crash_of(file.read_text())}" for rank, file in files.items() if file.exists())


def _crash_of(text: str) -> str:
    """Return what a rank has written to its stderr without torch's stacks of the threads that did not crash."""
    threads = text.split("\n\n")
    return "\n\n".join(t for t in threads if not re.match(r"SIG\w+\(\d+\), PID", t) or "::fatalSignalHandler(" in t)


def run_ranks(
    function: Callable[..., Any] | str, world: int, *args: Any, timeout: float = PATIENCE_S, **kwargs: Any
) -> list[Any]:
    """Run once in a new pool, for tests that kill ranks or leave processes in a bad state."""
    with RankPool(world) as pool:
        return pool.run(function, *args, timeout=timeout, **kwargs)
