"""Two snapshots side by side, in rows that keep the order of both graphs as far as possible."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from .edits import Diff
from .pair_nodes import NONE


@dataclass(frozen=True, slots=True)
class DiffRow:
    """A node of the first snapshot, one of the second, or both.

    `kind`: "same", "changed", "removed", "added", or "moved" (in both graphs, in another order, with a row for each).
    """

    before: int
    after: int
    kind: str
    edit: int = NONE
    """Index of the edit that the row belongs to."""


def align_rows(diff: Diff) -> list[DiffRow]:
    """Return the rows. As many pairs as possible keep their order and share a row; nodes between them have separate rows."""
    m = diff.matching
    edit_of_a = {i: k for k, e in enumerate(diff.edits) for i in (*e.removed, *(c.before for c in e.changed))}
    edit_of_b = {j: k for k, e in enumerate(diff.edits) for j in (*e.added, *(c.after for c in e.changed))}
    out: list[DiffRow] = []
    i = j = 0
    for x, y in [*_ordered_pairs(m.to_b), (len(m.to_b), len(m.to_a))]:
        for p in range(i, x):
            out.append(DiffRow(p, NONE, "removed" if m.to_b[p] == NONE else "moved", edit_of_a.get(p, NONE)))
        for q in range(j, y):
            out.append(DiffRow(NONE, q, "added" if m.to_a[q] == NONE else "moved", edit_of_b.get(q, NONE)))
        if x < len(m.to_b):
            out.append(DiffRow(x, y, "changed" if x in diff.changes else "same", edit_of_a.get(x, NONE)))
        i, j = x + 1, y + 1
    return out


def _ordered_pairs(to_b: list[int]) -> list[tuple[int, int]]:
    """A longest list of pairs that ascends in both graphs (patience sorting)."""
    tops: list[int] = []
    at: list[int] = []
    before: dict[int, int] = {}
    for i, j in enumerate(to_b):
        if j == NONE:
            continue
        k = bisect_left(tops, j)
        if k == len(tops):
            tops.append(j)
            at.append(i)
        else:
            tops[k], at[k] = j, i
        before[i] = at[k - 1] if k else NONE
    pairs = []
    i = at[-1] if at else NONE
    while i != NONE:
        pairs.append((i, to_b[i]))
        i = before[i]
    return pairs[::-1]
