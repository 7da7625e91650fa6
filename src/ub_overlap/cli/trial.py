"""One run of a command for `bisect`: its own session of processes, its output in a log file, a time limit.

The output goes to the file directly, not through a pipe: a process that outlives the command cannot block the search.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any

from .process_tree import find_descendants, kill

GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL: a launcher ends its ranks, and ranks write what they were doing."""
POLL_S = 0.05
MAX_OUTPUT = 64 << 20
"""Bytes of a run's output that are searched for the loss."""


class Outcome(Enum):
    """The result of a run."""

    GOOD = "good"
    BAD = "bad"
    TIMEOUT = "timeout"


@dataclass(slots=True)
class Trial:
    """A run. `exit_code`: negative for a signal, None for a timeout. `loss`: the last one printed."""

    number: int
    what: str
    disabled: str
    log: Path
    seconds: float = 0.0
    exit_code: int | None = None
    timed_out: bool = False
    loss: float | None = None
    outcome: Outcome = Outcome.GOOD

    def ending(self, with_loss: bool) -> str:
        """Return how the run ended: "exit code 3, loss 2.0"."""
        loss = f", loss {self.loss}" if with_loss else ""
        if self.timed_out:
            return f"timed out after {self.seconds:.0f} s{loss}"
        code = self.exit_code or 0
        return (f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}") + f" after {self.seconds:.0f} s{loss}"

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of the output."""
        return self.text().splitlines()[-count:] if count > 0 else []

    def text(self) -> str:
        """Return the output of the command, or its end if it is large."""
        with open(self.log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_OUTPUT))
            return log.read(MAX_OUTPUT).decode(errors="replace").partition("\n")[2]  # the first line is ours, or cut

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        loss = self.loss if self.loss is None or abs(self.loss) < float("inf") else str(self.loss)  # JSON has no NaN
        return {
            "number": self.number, "what": self.what, "disabled": self.disabled, "outcome": self.outcome.value,
            "exit_code": self.exit_code, "timed_out": self.timed_out, "loss": loss, "seconds": round(self.seconds, 3),
            "log": str(self.log),
        }  # fmt: skip


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Runner:
    """Runs a command again and again. `folder` gets run-1.log, run-2.log, ..."""

    def __init__(
        self, command: Sequence[str], folder: Path, timeout_s: float, loss: re.Pattern[str] | None, show_output: bool
    ) -> None:
        self.command, self.folder, self.timeout_s, self.loss, self.show_output = command, folder, timeout_s, loss, show_output
        self.trials: list[Trial] = []

    def run(self, what: str, disabled: str) -> Trial:
        """Run the command with the sites `disabled`, comma-separated patterns, and those of the user's UB_OVERLAP_DISABLE."""
        number = len(self.trials) + 1
        trial = Trial(number, what, disabled, self.folder / f"run-{number}.log")
        self.trials.append(trial)
        disable = ",".join(filter(None, (os.environ.get("UB_OVERLAP_DISABLE", ""), disabled)))
        env = {
            **os.environ,
            "UB_OVERLAP_DISABLE": disable,
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "PYTHONUNBUFFERED": "1",  # else a killed run loses its last lines
        }
        begin = time.monotonic()
        with open(trial.log, "wb", buffering=0) as log:
            log.write(f"# UB_OVERLAP_DISABLE={disable!r} {' '.join(self.command)}\n".encode(errors="backslashreplace"))
            start = log.tell()
            process = subprocess.Popen(
                self.command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                self._wait(process, trial, begin + self.timeout_s, start)
            finally:
                end_session(process)  # also for Ctrl-C, which reaches only this process
        trial.seconds = time.monotonic() - begin
        trial.exit_code = None if trial.timed_out else process.returncode
        if self.loss is not None:
            trial.loss = _last_number(self.loss, trial.text())
        return trial

    def _wait(self, process: subprocess.Popen[bytes], trial: Trial, deadline: float, start: int) -> None:
        with open(trial.log, "rb") as shown:
            shown.seek(start)
            while process.poll() is None:
                if time.monotonic() > deadline:
                    trial.timed_out = True
                    break
                self._show(shown)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
            self._show(shown)

    def _show(self, shown: IO[bytes]) -> None:
        if self.show_output and (new := shown.read()):
            sys.stderr.write(new.decode(errors="replace"))
            sys.stderr.flush()


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process, all processes of its session, and, where it still runs, its descendants in other sessions.

    torchrun gives each rank a session of its own, and may wait for 30 s before it kills them. By then GRACE_S are over.
    """
    family: dict[int, str] = {}
    if process.poll() is None:
        family = find_descendants([process.pid])  # before SIGTERM: the parent of an orphan is no longer known
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        family |= find_descendants([process.pid, *family])
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    kill(family)
    process.wait()


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that it ends the command too. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _last_number(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.findall(text)
    try:
        return float(found[-1])
    except (IndexError, ValueError):
        return None
