"""The tables of reports, commands and benchmarks: plain text without escape codes.

    site       kind               strategy
    ---------  -----------------  ----------
    forward.0  all_gather_matmul  pipelined

A table has any width, because logs and files have no limit. A command passes the width of its terminal. Then, until the table
fits: columns without values are left out, cells take their short form, long cells are wrapped to about two lines, and optional
columns are left out, least important first.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MIN_COLUMN = 8
GAP = 2
HEADER_PADDING = 2
"""tabulate's: a column is at least this much wider than its header."""
NARROW = 14
"""A column of this width or less is not wrapped to keep an optional column."""
PARTS = re.compile(r"(?<=[_./:])(?=\S)")
"""Where a word that is wider than its column is broken: between the parts of names and paths."""


class Abbreviated(str):
    """The text of a cell that has a shorter form for narrow tables."""

    short: str

    def __new__(cls, text: str, short: str) -> Abbreviated:
        cell = super().__new__(cls, text)
        cell.short = short
        return cell


def render_table(
    rows: Sequence[Mapping[str, Any]],
    *,
    width: int | None = None,
    optional: Sequence[str] = (),
    style: str = "simple",
    missing: str = "-",
    floats: str = "g",
    titles: Mapping[str, str] | None = None,
) -> str:
    """Return rows as a table, "" without rows. A row may lack keys; the columns are all keys in the order of appearance.

    `width`: the limit of a line. `optional`: columns that may be left out, least important first. A line below the table names
    what is left out. `style`: a format of tabulate. `floats`: the format of floats. `titles`: headers of columns, if not their
    keys. Strings are not converted: a digest of digits is not a number.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    titles = {c: (titles or {}).get(c, c) for c in columns}
    cells = {c: [_cell(row.get(c), missing, floats) for row in rows] for c in columns}
    widths = {c: _natural(titles[c], cells[c]) for c in columns}
    empty: list[str] = []
    left_out: list[str] = []
    if width is not None and _total(widths.values()) > width:
        empty = [c for c in columns if all(row.get(c) in (None, "") for row in rows)]
        columns = [c for c in columns if c not in empty]
        if _total(widths[c] for c in columns) > width:
            for c in columns:
                cells[c] = [getattr(row.get(c), "short", cell) for row, cell in zip(rows, cells[c], strict=True)]
                widths[c] = _natural(titles[c], cells[c])
        floors = {c: _floor(titles[c], cells[c]) for c in columns}
        for column in optional:
            if _total(floors[c] for c in columns) <= width:
                break
            if column in columns:
                columns.remove(column)
                left_out.append(column)
        _shrink(widths, columns, width, floors)
        _shrink(widths, columns, width, dict.fromkeys(columns, MIN_COLUMN))
    if not columns:
        return ""
    text = _tabulate(rows, columns, titles, cells, widths, style)
    return text + ("\n" + _note(left_out, empty, width) if (left_out or empty) and width is not None else "")


def _cell(value: Any, missing: str, floats: str) -> str:
    return missing if value is None else format(value, floats) if isinstance(value, float) else str(value)


def _natural(title: str, cells: Sequence[str]) -> int:
    """Return the width of a column that wraps nothing."""
    return max(len(title) + HEADER_PADDING, *map(_line_width, cells))


def _floor(title: str, cells: Sequence[str]) -> int:
    """Return the width that a column keeps before an optional one is left out: half of a long cell, and whole parts."""
    widest = max(map(_line_width, cells))
    body = widest if widest <= NARROW else max(math.ceil(widest / 2), *map(_longest_word, cells))
    return max(_longest_word(title) + HEADER_PADDING, body)


def _longest_word(text: str) -> int:
    return max((len(part) for word in text.split() for part in PARTS.split(word)), default=0)


def _line_width(text: str) -> int:
    return max(map(len, text.split("\n")))


def _total(widths: Iterable[int]) -> int:
    known = list(widths)
    return sum(known) + GAP * (len(known) - 1)


def _shrink(widths: dict[str, int], columns: Sequence[str], width: int, floors: Mapping[str, int]) -> None:
    """Make the widest columns narrower until the table fits, or until each is as narrow as its floor."""
    while _total(widths[c] for c in columns) > width:
        wider = [c for c in columns if widths[c] > floors[c]]
        if not wider:
            return
        widths[max(wider, key=lambda c: widths[c])] -= 1


def _tabulate(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    titles: Mapping[str, str],
    cells: Mapping[str, Sequence[str]],
    widths: Mapping[str, int],
    style: str,
) -> str:
    from tabulate import tabulate

    body = [[_wrap(cells[c][k], widths[c]) for c in columns] for k in range(len(rows))]
    aligned = ["right" if _is_number(rows, c) else "left" for c in columns]
    heads = [_wrap(titles[c], widths[c] - HEADER_PADDING) for c in columns]
    return tabulate(body, heads, tablefmt=style, disable_numparse=True, colalign=aligned)


def _is_number(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    values = [row[column] for row in rows if row.get(column) is not None]
    return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


class _Wrapper(textwrap.TextWrapper):
    """Wraps at spaces, words that are too long between their parts, and parts that are too long anywhere."""

    def _split(self, text: str) -> list[str]:
        words = re.split(r"(\s+)", text)
        return [part for word in words for part in (PARTS.split(word) if len(word) > self.width else [word]) if part]


def _wrap(text: str, width: int) -> str:
    if _line_width(text) <= width:
        return text
    wrapper = _Wrapper(width)
    return "\n".join(part for line in text.split("\n") for part in wrapper.wrap(line) or [""])


def _note(left_out: Sequence[str], empty: Sequence[str], width: int) -> str:
    """Return the lines that name the columns that were left out."""
    text = f"not shown in {width} columns: {', '.join(left_out)} (a wider terminal or --json shows them)" if left_out else ""
    text += ("; " if left_out and empty else "") + (f"without values: {', '.join(empty)}" if empty else "")
    return "\n".join(textwrap.wrap(text, width))
