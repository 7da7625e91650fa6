"""Tables of a stored measurement of memory kernels. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table

GOALS = {("copy", 128): 4.0, **{(f"sum of {n}", 128): 3.8 for n in (2, 4, 8)}, **{(f"sum of {n}", 32): 3.3 for n in (2, 4, 8)}}
"""TB/s, bytes read and written, by kernel and MiB."""


def moved_bytes(sources: int, size: int) -> int:
    """Return the bytes that a sum of `sources` parts of `size` bytes together reads and writes; one part: a copy."""
    return size + size // sources


def rate(row: dict[str, Any]) -> float:
    """Return TB/s, bytes read and written."""
    return moved_bytes(row["sources"], row["mib"] << 20) / row["us"] / 1e6


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return the table, and one line per goal that is missed."""
    rows, missed = [], []
    for row in document["rows"]:
        goal = GOALS.get((row["kernel"], row["mib"]))
        rows.append({
            "kernel": row["kernel"], "MiB": row["mib"], "us": f"{row['us']:.1f}", "TB/s": f"{rate(row):.2f}",
            "goal": f"{goal:.1f}" if goal else "-", "us off a matmul": f"{row['off_us']:.1f}",
            "of its time": f"{row['off_us'] / row['us']:.0%}",
        })  # fmt: skip
        if goal and rate(row) < goal:
            missed.append(f"{row['kernel']}, {row['mib']} MiB: {rate(row):.2f} TB/s, goal {goal:.1f}")
    m, n, k = document["matmul"]
    head = f"matmul {m} x {n} x {k}, bf16: {document['matmul_us']:.0f} us alone"
    verdict = "goals missed:\n" + "\n".join(missed) if missed else "all goals are reached"
    return "\n\n".join([render_table(rows, style=style), head, verdict])
