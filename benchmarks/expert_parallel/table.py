"""Table of a stored measurement of expert parallelism. No torch is needed."""

from __future__ import annotations

from typing import Any

from .. import waterfall
from ..parallel.table import row_text

BASELINE = "inductor"


def _title(row: dict[str, Any]) -> str:
    title = f"{row['size']}, {row['layers']} layers, {row['tokens']} tokens, {row['own']} experts a rank, {row['routing']}"
    return title + (", checkpointed" if row.get("checkpoint") else "")


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return one table per layer, with the share of Inductor's exposed time that is hidden, and what plans predict of it.

    Then the waterfall of its steps, where it was measured.
    """
    parts = []
    for row in document["rows"]:
        parts.append(row_text(_title(row), row, style, BASELINE, lambda name: BASELINE, has_predictions=True))
        parts.extend(waterfall.section(row, f"{row['layers']} layers", style))
    return "\n\n".join(parts) or "no rows"
