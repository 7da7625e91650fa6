"""HTML for notebooks: the tables of a report, as objects return them from `_repr_html_`.

fragment.html  a jinja2 template      fragment.css  its style, which applies inside of the fragment only

The fragment has no script and fetches nothing. Without its style, which some viewers remove, it is still plain tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...plan.outcome import outcome_of
from ...plan.reasons import Reason

FOLDER = Path(__file__).parent
_REASONS = {reason.value for reason in Reason}
MAX_ROWS = 200
"""Rows of a table in a notebook. Notebooks store their outputs."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table with a heading and text below it. `is_open`: shown unfolded. `floats`: the format of floats."""

    heading: str
    rows: Sequence[Mapping[str, Any]]
    text: str = ""
    is_open: bool = True
    floats: str = "g"


def render_notebook(sections: Sequence[Section]) -> str:
    """Return the sections as an HTML fragment."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    css = Markup((FOLDER / "fragment.css").read_text(encoding="utf-8"))
    return environment.get_template("fragment.html").render(css=css, sections=[_prepared(s) for s in sections])


def _prepared(section: Section) -> dict[str, Any]:
    columns = list(dict.fromkeys(key for row in section.rows for key in row))
    rows = [[_cell(row.get(c), c, section.floats, _reason_in(row)) for c in columns] for row in section.rows[:MAX_ROWS]]
    more = len(section.rows) - len(rows)
    return {
        "heading": section.heading, "columns": columns, "rows": rows, "more": more, "text": section.text,
        "open": section.is_open,
    }  # fmt: skip


def _reason_in(row: Mapping[str, Any]) -> str | None:
    """Return the reason that a row of a report gives, in a column of its own or where others have hidden bytes."""
    values = (row.get("reason"), row.get("hidden bytes / reason"))
    return next((value for value in values if value in _REASONS), None)


def _cell(value: Any, column: str, floats: str, reason: str | None) -> dict[str, str]:
    text = "-" if value is None else format(value, floats) if isinstance(value, float) else str(value)
    look = "number" if re.fullmatch(r"-?\d+(\.\d+)?", text) else ""
    if column in ("strategy", "choice"):
        look = outcome_of(text, reason).name
    return {"text": text, "look": look}
