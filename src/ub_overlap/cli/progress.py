"""Progress of a long command on stderr: one line with a spinner, the current step and the elapsed time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ub_overlap.compiler.text.terminal import is_terminal

Report = Callable[[str], None]
"""Receives the name of each step when it begins."""


@contextmanager
def show_progress(title: str, *, quiet: bool = False) -> Iterator[Report]:
    """Yield a function that shows the current step. It shows nothing with `quiet`, or if stderr is not a terminal.

    The line is removed at the end. A dumb terminal gets one line per step.
    """
    if quiet or not is_terminal(sys.stderr):
        yield lambda step: None
    elif os.environ.get("TERM") in ("dumb", "unknown"):
        yield lambda step: print(f"{title}: {step}", file=sys.stderr, flush=True)
    else:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
            task = progress.add_task(title, total=None)
            yield lambda step: progress.update(task, description=f"{title}: {step}")
