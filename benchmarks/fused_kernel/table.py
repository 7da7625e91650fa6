"""Table of a stored measurement of the kernel of fused collectives. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table

COLUMNS = ("norm", "sum", "fused", "norm behind a matmul", "fused behind a matmul")


def exposed(us: dict[str, float]) -> float:
    """Return what a collective without a link adds to a layer, in microseconds."""
    return us["fused behind a matmul"] - us["norm behind a matmul"]


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return the table."""
    rows = [
        {
            "ranks": row["ranks"], "rows": row["rows"], "cols": row["cols"], "KiB": row["rows"] * row["cols"] // 512,
            **{name: f"{row['us'][name]:.1f}" for name in COLUMNS},
            "exposed": f"{exposed(row['us']):.1f}",
        }
        for row in document["rows"]
    ]  # fmt: skip
    return f"{render_table(rows, style=style)}\n\nmicroseconds on one GPU that is its own peer: without a link"
