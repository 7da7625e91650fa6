"""Tables of a stored measurement of grouped matmuls, next to what the cost model predicts."""

from __future__ import annotations

import statistics
from typing import Any

from ub_overlap.compiler.cost import Profile, load
from ub_overlap.compiler.cost.curve import at
from ub_overlap.compiler.cost.grouped_time import grouped_us
from ub_overlap.compiler.text.table import render_table

FORMS = {"nt": "m", "nn": "m", "tn": "k", "batch": "", "float8": "m"}
"""Which size the groups divide, by form."""


def predicted_us(profile: Profile, form: str, groups: int, m: int, n: int, k: int) -> float:
    """Return the cost model's time of `groups` products [m, k] @ [k, n]."""
    divided = FORMS[form]
    total = {name: size * groups if name == divided else size for name, size in (("m", m), ("n", n), ("k", k))}
    return grouped_us(profile, "float8" if form == "float8" else "bfloat16", groups, *total.values(), divided)


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return the table of errors by form, and the table of pieces."""
    profile = load(document["profile"])
    return "\n\n".join([
        f"predicted with {document['profile']}; error: predicted / measured - 1",
        render_table(_errors(document, profile), style=style), "us of an expert layer in pieces by source rank",
        render_table([_piece_row(row, profile) for row in document["pieces"]], style=style),
    ])  # fmt: skip


def _errors(document: dict[str, Any], profile: Profile) -> list[dict[str, Any]]:
    by_form: dict[str, list[float]] = {form: [] for form in FORMS}
    for shape, us in document["shapes"].items():
        form, *sizes = shape.split()
        by_form[form].append(predicted_us(profile, form, *map(int, sizes)) / us - 1)
    rows = []
    for form, errors in by_form.items():
        errors.sort()
        if errors:
            low, high = errors[len(errors) // 20], errors[-1 - len(errors) // 20]
            rows.append({
                "form": form, "shapes": len(errors), "mean |error|": f"{statistics.mean(map(abs, errors)):.1%}",
                "median error": f"{statistics.median(errors):+.1%}", "middle 90%": f"{low:+.0%} to {high:+.0%}",
                "worst": f"{max(errors, key=abs):+.0%}",
            })  # fmt: skip
    return rows


def _piece_row(row: dict[str, Any], profile: Profile) -> dict[str, Any]:
    cells = {"widths": row["widths"], "own experts": row["own"], "whole": f"{row['us']['1']:.0f}"}
    for count, us in row["us"].items():
        if count != "1":
            piece = row["rows"] * row["hidden"] * 2 // int(count)
            transfer = (int(count) - 1) * at(profile.push, piece)
            cells[f"{count} pieces"] = f"{us:.0f} ({us - row['us']['1']:+.0f})"
            cells[f"transfer, {count} ranks"] = f"{transfer:.0f}"
    return cells
