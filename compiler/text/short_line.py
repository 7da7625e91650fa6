"""Lines of code, "file:line: code", as tables and pages name them."""

from __future__ import annotations

import re

_LINE = re.compile(r"(.*?:\d+): ")


def short_line(source: str) -> str:
    """Return "model.py:12" for "/home/me/model.py:12: code"; "" for "". A folder may have a name with ": "."""
    found = _LINE.match(f"{source} ")
    return re.split(r"[/\\]", found[1] if found else source)[-1]
