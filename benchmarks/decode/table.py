"""Tables of a stored measurement of decode. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table

GOALS = {16 << 10: 6.0, 256 << 10: 10.0, 1 << 20: 17.0}
"""Microseconds of our all_reduce + residual + norm at 2 ranks, by bytes."""
OURS = ("one_shot + norm", "two_shot + norm")


BASELINE = "inductor"
HIDDEN = 0.5
"""Share of the exposed communication that decode layers at 2 ranks should hide."""


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return the tables of single ops and of layers, and what ours misses."""
    tables = [ops_table(document, style)] if document["rows"] else []
    return "\n\n".join(tables + ([layers_table(document, style)] if document.get("layers") else []))


def layers_table(document: dict[str, Any], style: str) -> str:
    """Return microseconds per layer, CUDA graphs where there are any, and the share of communication that ours hides."""
    rows, missed, notes = [], [], {}
    for row in document["layers"]:
        us = {name: 1e3 * ms / row["layers"] for name, v in row["variants"].items() if (ms := v.get("step_g") or v.get("step"))}
        cells: dict[str, Any] = {"size": row["size"], "batch": row["batch"]}
        cells |= {name: f"{us[name]:.1f}" if name in us else "-" for name in row["variants"]}
        exposed = us.get(BASELINE, 0.0) - us.get("compute", 0.0)
        for name, variant in row["variants"].items():
            notes |= {f"{name} {kind}: {why}": None for kind, why in variant["why"].items()}
            if name in document["ours"]:
                share = (
                    (us[BASELINE] - us[name]) / exposed if {name, BASELINE, "compute"} <= us.keys() and exposed > 0 else None
                )
                cells |= {f"{name} hides": "-" if share is None else f"{share:.0%}", f"{name} sites": variant.get("sites", "")}
                if share is not None and share < HIDDEN and document["ranks"] == 2 and document["device"] == "cuda":
                    missed.append(f"{row['size']} batch {row['batch']}: {name} hides {share:.0%}, goal {HIDDEN:.0%}")
        rows.append(cells)
    verdict = "missed:\n" + "\n".join(missed) if missed else "nothing is missed"
    table = render_table(rows, style=style)
    return "\n\n".join(part for part in ("us per layer, CUDA graph", table, verdict, "\n".join(notes)) if part)


def ops_table(document: dict[str, Any], style: str) -> str:
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
    parts = (document.get("mirror", ""), "us per call, CUDA graph", table, verdict, "\n".join(notes))
    return "\n\n".join(part for part in parts if part)


def size(count: int) -> str:
    """Return bytes as KiB or MiB."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count / 1024:g} KiB"
