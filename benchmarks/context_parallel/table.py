"""Table of a stored measurement of context parallelism. No torch is needed."""

from __future__ import annotations

from typing import Any

from ..parallel.table import row_text

BASELINE = "inductor"


def baseline_of(name: str) -> str:
    """Return the variant of Inductor in the form of a variant SYSTEM_FORM."""
    return f"{BASELINE}_{name.rpartition('_')[2]}"


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return one table per size and sequence, with the share of Inductor's exposed time in the same form that is hidden."""
    titles = [(f"{row['size']}, {row['layers']} layers, {row['seq']} tokens", row) for row in document["rows"]]
    return "\n\n".join(row_text(title, row, style, BASELINE, baseline_of) for title, row in titles) or "no rows"
