"""Table of a stored measurement of data parallelism. No torch is needed."""

from __future__ import annotations

from typing import Any

from .. import waterfall
from ..parallel.table import row_text

BASELINE = "fsdp2"


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return one table per size, with the share of FSDP2's exposed time that is hidden.

    Then the waterfall of its steps, where it was measured.
    """
    parts = []
    for size in document["rows"]:
        title = f"{size['size']}, {size['layers']} layers, {size['seq']} tokens"
        title += f", TP {size['tp']}" if size.get("tp", 1) > 1 else ""
        title += f", {size['replicas']} replicas" if size.get("replicas", 1) > 1 else ""
        parts.append(row_text(title, size, style, BASELINE, lambda name: BASELINE))
        parts.extend(waterfall.section(size, f"{size['layers']} layers", style))
    return "\n\n".join(parts) or "no rows"
