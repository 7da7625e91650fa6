"""Table of a stored measurement of prefetches. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table


def saved_us(row: dict[str, Any]) -> dict[str, float]:
    """Return what a round takes less than without prefetching, by MiB."""
    us = row["us"]
    return {mib: us["0"] - value for mib, value in us.items() if mib not in ("matmuls", "0")}


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return the table: microseconds of the matmuls and of a round, and what each number of MiB saves."""
    rows = [
        {
            "model": f"{row['size']}, {row['ranks']} ranks", "matmuls of": row["site"], "batch": row["batch"],
            "MiB": f"{row['bytes'] / 2**20:.0f}", "matmuls us": f"{row['us']['matmuls']:.1f}",
            "round us": f"{row['us']['0']:.1f}",
            **{f"{mib} MiB saves": f"{us:.1f}" for mib, us in saved_us(row).items()},
        }
        for row in document["rows"]
    ]  # fmt: skip
    return f"{render_table(rows, style=style)}\n\na round waits {document['wait_us']:g} us in front of the matmuls"
