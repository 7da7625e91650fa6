"""The tables of reports, commands and benchmarks: plain text without escape codes.

    site       kind               strategy
    ---------  -----------------  ----------
    forward.0  all_gather_matmul  pipelined

A table has any width, because logs and files have no limit. A command passes the width of its terminal. Then optional columns
are left out, least important first, and long cells are wrapped.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

MIN_COLUMN = 8
GAP = 2
HEADER_PADDING = 2
"""tabulate's: a column is at least this much wider than its header."""


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

    `width`: the limit of a line. `optional`: columns that may be left out, least important first; a line below the table names
    them. `style`: a format of tabulate. `floats`: the format of floats. `titles`: headers of columns, if not their keys.
    Strings are not converted: a digest of digits is not a number.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    titles = {c: (titles or {}).get(c, c) for c in columns}
    cells = {c: [_cell(row.get(c), missing, floats) for row in rows] for c in columns}
    natural = {c: max(len(titles[c]) + HEADER_PADDING, *map(_line_width, cells[c])) for c in columns}
    left_out: list[str] = []
    if width is not None:
        for column in optional:
            if _total(natural[c] for c in columns) <= width:
                break
            if column in columns:
                columns.remove(column)
                left_out.append(column)
        _shrink(natural, columns, width)
    if not columns:
        return ""
    text = _tabulate(rows, columns, titles, cells, natural, style)
    return text + ("\n" + _note(left_out, width) if left_out and width is not None else "")


def _cell(value: Any, missing: str, floats: str) -> str:
    return missing if value is None else format(value, floats) if isinstance(value, float) else str(value)


def _line_width(text: str) -> int:
    return max(map(len, text.split("\n")))


def _total(widths: Any) -> int:
    known = list(widths)
    return sum(known) + GAP * (len(known) - 1)


def _shrink(widths: dict[str, int], columns: Sequence[str], width: int) -> None:
    """Make the widest columns narrower until the table fits, or until no column can be narrower."""
    while _total(widths[c] for c in columns) > width:
        widest = max(columns, key=lambda c: widths[c])
        if widths[widest] <= MIN_COLUMN:
            return
        widths[widest] -= 1


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


def _wrap(text: str, width: int) -> str:
    if _line_width(text) <= width:
        return text
    return "\n".join(part for line in text.split("\n") for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""])


def _note(left_out: Sequence[str], width: int) -> str:
    """Return the line that names the columns that were left out."""
    text = f"not shown in {width} columns: {', '.join(left_out)} (a wider terminal or --json shows them)"
    return "\n".join(textwrap.wrap(text, width))
