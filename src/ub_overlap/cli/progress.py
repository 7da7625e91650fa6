"""Progress of a long command on stderr: the current step and the elapsed time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from ub_overlap.compiler.text.terminal import is_terminal

Report = Callable[[str], None]
"""Receives the name of each step when it begins."""
LINES_EVERY_S = 5.0
"""Seconds between two lines where stderr is not a terminal."""


@contextmanager
def show_progress(title: str, *, quiet: bool = False) -> Iterator[Report]:
    """Yield a function that shows the current step, or does nothing with `quiet`.

    A terminal shows one line with a spinner, which is removed at the end. A pipe, a file or a dumb terminal gets a line every
    LINES_EVERY_S seconds, so a quick command prints none.
    """
    stream = sys.stderr
    if quiet or stream is None:  # None if the caller closed it
        yield lambda step: None
    elif not is_terminal(stream) or os.environ.get("TERM") in ("dumb", "unknown"):
        with _print_lines(title, stream) as report:
            yield report
    else:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=Console(file=stream), transient=True) as progress:
            task = progress.add_task(title, total=None)
            yield lambda step: progress.update(task, description=f"{title}: {step}")


@contextmanager
def _print_lines(title: str, stream: TextIO) -> Iterator[Report]:
    """Yield a function that sets the step of the lines that a thread prints."""
    begin, steps, ended = time.monotonic(), ["starting"], threading.Event()

    def print_lines() -> None:
        with suppress(OSError, ValueError):  # the reader ended, or the stream was closed
            while not ended.wait(LINES_EVERY_S):
                print(f"{title}: {steps[-1]} ({time.monotonic() - begin:.0f} s)", file=stream, flush=True)

    thread = threading.Thread(target=print_lines, name="ub_overlap progress", daemon=True)
    thread.start()
    try:
        yield lambda step: steps.__setitem__(-1, step)
    finally:
        ended.set()
        thread.join()
