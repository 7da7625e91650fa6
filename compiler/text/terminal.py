"""Capabilities of an output stream: color and width. Standard library only."""

from __future__ import annotations

import os
import shutil
import sys
from typing import IO


def wants_color(stream: IO[str] | None = None) -> bool:
    """Return whether a stream shows color: NO_COLOR, FORCE_COLOR and TERM=dumb decide in this order, then whether it is a
    terminal. Empty variables do not count."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return os.environ["FORCE_COLOR"] != "0"
    return os.environ.get("TERM") != "dumb" and is_terminal(stream)


def is_terminal(stream: IO[str] | None = None) -> bool:
    """Return whether a stream is a terminal. A closed stream is none."""
    stream = stream or sys.stdout
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def output_width(stream: IO[str] | None = None) -> int | None:
    """Return the columns of a stream; None without a limit, e.g. for files and pipes. COLUMNS sets a limit for any stream."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    return shutil.get_terminal_size().columns if is_terminal(stream) else None


def paint(text: str, color: int, on: bool) -> str:
    """Return `text` in an ANSI color (31 red, 32 green, 33 yellow, 36 cyan), or unchanged."""
    return f"\x1b[{color}m{text}\x1b[0m" if on else text
