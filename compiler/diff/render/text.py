"""A diff for a terminal: both graphs as one unified text. str() of a Diff is a table."""

from __future__ import annotations

from ...text.terminal import paint
from ..edits import Diff
from ..pair_nodes import NONE
from ..rows import DiffRow, align_rows
from ..snapshot import Snapshot, format_node

_COLORS = {"removed": 31, "added": 32, "hunk": 36}


def unified(diff: Diff, context: int = 3, color: bool = False) -> str:
    """Return both graphs as one text, like `diff -u`; "" if they are the same.

    A node that only moved is shown once, where the second graph has it.
    """
    shown = [r for r in align_rows(diff) if r.kind != "moved" or r.after != NONE]
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
            out.append(paint(f"@@ -{i + 1} +{j + 1} @@{about}", _COLORS["hunk"], color))
        inside = keep
        if keep:
            out += _lines(diff, row, color)
        i, j = i + (row.before != NONE), j + (row.after != NONE)
    return "\n".join(out)


def _lines(diff: Diff, row: DiffRow, color: bool) -> list[str]:
    match row.kind:
        case "removed":
            return [paint("-" + _node(diff.a, row.before), _COLORS["removed"], color)]
        case "added":
            return [paint("+" + _node(diff.b, row.after), _COLORS["added"], color)]
        case "changed":
            return [
                paint("-" + _node(diff.a, row.before), _COLORS["removed"], color),
                paint("+" + _node(diff.b, row.after), _COLORS["added"], color),
            ]
    return [" " + _node(diff.b, row.after)]


def _node(snapshot: Snapshot, place: int) -> str:
    return format_node(snapshot, snapshot.nodes[place])


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
