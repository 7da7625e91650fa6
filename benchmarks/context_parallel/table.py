"""Table of a stored measurement of context parallelism. No torch is needed."""

from __future__ import annotations

from typing import Any

from .. import waterfall
from ..parallel.table import row_text

BASELINE = "inductor"


def baseline_of(name: str) -> str:
    """Return the variant of Inductor in the form of a variant SYSTEM_FORM."""
    return f"{BASELINE}_{name.rpartition('_')[2]}"


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return one table per size and sequence, with the share of Inductor's exposed time in the same form that is hidden.

    Then the waterfall of its steps, where it was measured.
    """
    parts = []
    for row in document["rows"]:
        title = f"{row['size']}, {row['layers']} layers, {row['seq']} tokens{', causal' if row.get('causal') else ''}"
        parts.append(row_text(title, row, style, BASELINE, baseline_of))
        parts.extend(waterfall.section(row, f"{row['layers']} layers", style))
    return "\n\n".join(parts) or "no rows"
