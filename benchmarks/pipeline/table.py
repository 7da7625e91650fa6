"""Table of a stored measurement of pipeline parallelism. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return a table of messages and one of steps."""
    rows = []
    for row in document["rows"]:
        if row["kind"] != "message":
            continue
        for transport in ("c10d", "ours"):
            ms = row["ms"]
            alone = ms[f"{transport} message"]
            rows.append(
                {
                    "message": f"{row['bytes'] / 2**20:g} MiB{', both ways' if row['both_ways'] else ''}",
                    "transport": transport,
                    "alone ms": f"{alone:.3f}",
                    "GB/s": f"{row['bytes'] / alone / 1e6:.0f}",
                    "matmul ms": f"{ms['matmul']:.3f}",
                    "both ms": f"{ms[f'{transport} both']:.3f}",
                    "matmul loses": f"{100 * row[f'{transport} loss']:.1f}%",
                }
            )
    parts = [render_table(rows, style=style)] if rows else []
    steps = [
        {
            "schedule": row["schedule"],
            "stage": f"{row['layers']} x {row['width']}, {row['tokens']} tokens, {row['microbatches']} microbatches",
            "c10d ms": f"{row['ms']['c10d']:.2f}",
            "ours ms": f"{row['ms']['ours']:.2f}",
            "c10d / ours": f"{row['ms']['c10d'] / row['ms']['ours']:.3f}",
            **({"deferred ms": f"{row['ms']['deferred']:.2f}"} if "deferred" in row["ms"] else {}),
            "difference": f"{row['difference']:.1e}",
        }
        for row in document["rows"]
        if row["kind"] == "step"
    ]
    parts += [render_table(steps, style=style)] if steps else []
    return "\n\n".join(parts) or "no rows"
