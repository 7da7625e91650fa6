"""Table of a stored measurement of matmuls concurrent with split collectives. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table

NAME = "concurrent_matmul"
"""Of the benchmark, in its files."""
BOUND = 1.05
"""A matmul next to a collective may take this much of its time alone."""
KINDS = {"": "", "_g": " (g)"}


def ratio(row: dict[str, Any], kind: str) -> float | None:
    """Return the time of the matmul next to the collective over its time alone, None without both."""
    alone, concurrent = (row["ms"].get(f"{name}{kind}") for name in ("alone", "concurrent"))
    return concurrent / alone if alone and concurrent else None


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return one table: microseconds of the collective and of the matmul, and the ratio of both matmuls; then the worst."""
    lines = []
    for row in document["rows"]:
        line: dict[str, Any] = {"collective": row["collective"], "MiB": row["mib"]}
        for kind, mark in KINDS.items():
            for name in ("collective", "alone", "concurrent"):
                ms = row["ms"].get(f"{name}{kind}")
                line[f"{name}{mark} us"] = f"{1e3 * ms:.1f}" if ms else "-"
            found = ratio(row, kind)
            line[f"concurrent / alone{mark}"] = f"{found:.3f}" if found else "-"
        lines.append(line)
    notes = [
        f"no {row['collective']} of {row['mib']} MiB{KINDS[kind]}: {why}"
        for row in document["rows"] for kind, why in row["why"].items()
    ]  # fmt: skip
    found = [(r, row) for row in document["rows"] for kind in KINDS if (r := ratio(row, kind))]
    if found and document["device"] == "cuda":
        worst, row = max(found, key=lambda pair: pair[0])
        verdict = "met" if worst <= BOUND else "missed"
        notes.append(f"worst {worst:.3f}, {row['collective']} of {row['mib']} MiB; the goal of {BOUND} is {verdict}")
    table = render_table(lines, style=style, titles={"alone us": "matmul us", "alone (g) us": "matmul (g) us"})
    return "\n\n".join(part for part in (table, "\n".join(notes)) if part) or "no rows"
