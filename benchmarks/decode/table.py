"""Tables of a stored measurement of decode. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table

GOALS = {16 << 10: 6.0, 256 << 10: 10.0, 1 << 20: 17.0}
"""Microseconds of our all_reduce + residual + norm at 2 ranks, by bytes."""
OURS = ("one_shot + norm", "two_shot + norm")


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return the table of single ops: microseconds per call, and what ours misses."""
    rows, missed, notes = [], [], {}
    for row in document["rows"]:
        us = row["us"]
        best = min((us[name] for name in OURS if name in us), default=None)
        goal = GOALS.get(row["bytes"]) if document["ranks"] == 2 and document["device"] == "cuda" else None
        cells: dict[str, Any] = {"bytes": size(row["bytes"]), "rows": row["rows"]}
        cells |= {name: f"{value:.1f}" for name, value in us.items()}
        cells["goal"] = f"{goal:.0f}" if goal else "-"
        rows.append(cells)
        if best is not None and goal is not None and best > goal:
            missed.append(f"{size(row['bytes'])}: {best:.1f} us, goal {goal:.0f}")
        plain = us.get("nccl + norm")
        if best is not None and plain is not None and best > plain and document["device"] == "cuda":
            missed.append(f"{size(row['bytes'])}: {best:.1f} us, nccl + norm {plain:.1f}")
        notes |= {f"no {name}: {why}": None for name, why in row["why"].items()}
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "goal"))
    table = render_table([{c: row.get(c, "-") for c in (*columns, "goal")} for row in rows], style=style)
    verdict = "missed:\n" + "\n".join(missed) if missed else "nothing is missed"
    return "\n\n".join(part for part in ("us per call, CUDA graph", table, verdict, "\n".join(notes)) if part)


def size(count: int) -> str:
    """Return bytes as KiB or MiB."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count / 1024:g} KiB"
