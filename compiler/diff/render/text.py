"""A diff on a terminal: both graphs as one unified text, beside the table that str() of a Diff is."""

from __future__ import annotations

import os
import sys
from typing import IO

from ..edits import Diff
from ..pair_nodes import NONE
from ..rows import DiffRow, rows
from ..snapshot import Snapshot, line_of

_COLOURS = {"removed": "31", "added": "32", "changed": "33", "hunk": "36"}


def wants_colour(stream: IO[str] | None = None) -> bool:
    """Terminals, unless NO_COLOR is set."""
    stream = stream or sys.stdout
    return not os.environ.get("NO_COLOR") and stream.isatty()


def painted(text: str, kind: str, colour: bool) -> str:
    return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if colour and kind in _COLOURS else text


def unified(diff: Diff, context: int = 3, colour: bool = False) -> str:
    """Both graphs as one text, as `diff -u` shows files; "" where they are the same. What only moved is shown once, where the
    second graph has it."""
    shown = [r for r in rows(diff) if r.kind != "moved" or r.after != NONE]
    near = _near([r.kind not in ("same", "moved") for r in shown], context)
    if not any(near):
        return ""
    out = [f"--- {diff.a.label or 'before'}", f"+++ {diff.b.label or 'after'}"]
    i = j = 0
    inside = False
    for k, (row, keep) in enumerate(zip(shown, near, strict=True)):
        if keep and not inside:
            edit = diff.edits[e] if (e := _next_edit(shown, k, near)) != NONE else None
            about = f" {edit.site or edit.module}" if edit and (edit.site or edit.module) else ""
            out.append(painted(f"@@ -{i + 1} +{j + 1} @@{about}", "hunk", colour))
        inside = keep
        if keep:
            out += _lines(diff, row, colour)
        i, j = i + (row.before != NONE), j + (row.after != NONE)
    return "\n".join(out)


def _lines(diff: Diff, row: DiffRow, colour: bool) -> list[str]:
    match row.kind:
        case "removed":
            return [painted("-" + _node(diff.a, row.before), "removed", colour)]
        case "added":
            return [painted("+" + _node(diff.b, row.after), "added", colour)]
        case "changed":
            return [
                painted("-" + _node(diff.a, row.before), "removed", colour),
                painted("+" + _node(diff.b, row.after), "added", colour),
            ]
    return [" " + _node(diff.b, row.after)]


def _node(snapshot: Snapshot, place: int) -> str:
    return line_of(snapshot, snapshot.nodes[place])


def _near(marked: list[bool], context: int) -> list[bool]:
    """True within `context` places of a True."""
    out, left = [False] * len(marked), 0
    for step in (range(len(marked)), range(len(marked) - 1, -1, -1)):
        left = 0
        for k in step:
            left = context + 1 if marked[k] else left - 1
            out[k] = out[k] or left > 0
    return out


def _next_edit(shown: list[DiffRow], start: int, near: list[bool]) -> int:
    """The first edit of the hunk that begins at `start`."""
    for k in range(start, len(shown)):
        if not near[k]:
            break
        if shown[k].edit != NONE:
            return shown[k].edit
    return NONE
