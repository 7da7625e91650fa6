"""Tables of stored measurements: what each variant adds to the compute. No torch is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ub_overlap.compiler.text.table import render_table

KINDS = {"step": "fwd + bwd", "forward": "fwd", "step_g": "fwd + bwd (g)", "forward_g": "fwd (g)"}
COMPUTE = "compute"


def hidden(variants: dict[str, Any], name: str, kind: str, baseline: str) -> float | None:
    """Return the share of what `baseline` takes over compute that a variant does not, None if unknown."""
    theirs, alone, own = (variants.get(v, {}).get(kind) for v in (baseline, COMPUTE, name))
    if name in (baseline, COMPUTE) or not theirs or not alone or not own or theirs <= alone:
        return None
    return (theirs - own) / (theirs - alone)


def predicted_columns(variants: dict[str, Any], name: str, baseline: str) -> dict[str, str]:
    """Return what a step was predicted to expose and to save, and what it saves against the baseline, in milliseconds."""
    predicted = variants[name].get("predicted", {})
    theirs, own = variants.get(baseline, {}).get("step"), variants[name].get("step")
    saved = theirs - own if theirs and own and predicted else None
    columns = {"exposed": predicted.get("exposed_ms"), "saves": saved, "saved": predicted.get("saved_ms")}
    return {f"{key} ms": "-" if ms is None else f"{ms:.2f}" for key, ms in columns.items()}


def row_text(
    title: str,
    row: dict[str, Any],
    style: str,
    what: str,
    baseline_of: Callable[[str], str],
    has_predictions: bool = False,
) -> str:
    """Return the table of one row of a document: ms, time over compute, share of the baseline's exposed time, peak memory.

    `what`: the baseline's name. `baseline_of`: the variant with which a variant is compared. Below: switches of torch that
    variants set, and why numbers are missing. `has_predictions`: with columns of what plans predict, where there are any.
    """
    variants = row["variants"]
    kinds = [kind for kind in KINDS if any(v.get(kind) for v in variants.values())]
    lines = []
    for name, v in variants.items():
        line = {title: name}
        for kind in kinds:
            ms, alone = v.get(kind), variants.get(COMPUTE, {}).get(kind)
            share = hidden(variants, name, kind, baseline_of(name))
            line[f"{KINDS[kind]} ms"] = f"{ms:.2f}" if ms else "-"
            line[f"over compute {kind}"] = f"{ms - alone:.2f}" if ms and alone and name != COMPUTE else "-"
            line[f"hidden {kind}"] = "-" if share is None else f"{100 * share:.0f}%"
        if has_predictions and any(one.get("predicted") for one in variants.values()):
            line |= predicted_columns(variants, name, baseline_of(name))
        line["peak MiB"] = f"{v['peak_mib']:.0f}" if v.get("peak_mib") else "-"
        if any(one.get("arena_mib") for one in variants.values()):
            line["landing MiB so far"] = f"{v.get('arena_mib', 0):.0f}"
        line["sites"] = v.get("sites") or "-"
        line["error"] = f"{v['error']:.1e}" if v.get("error") is not None else "-"
        lines.append(line)
    titles = {f"over compute {kind}": "over compute" for kind in kinds}
    titles |= {f"hidden {kind}": f"of {what}'s hidden" for kind in kinds}
    titles |= {"exposed ms": "over compute, predicted", "saves ms": f"saved of {what}'s", "saved ms": "saved, predicted"}
    notes = [
        f"{name}: no prediction of {v['predicted']['unknown']} collectives"
        for name, v in variants.items() if has_predictions and v.get("predicted", {}).get("unknown")
    ]  # fmt: skip
    notes += [f"{name} sets {json.dumps(v['settings'])}" for name, v in variants.items() if v.get("settings")]
    notes += [f"no {name} {kind}: {why}" for name, v in variants.items() for kind, why in v.get("why", {}).items()]
    return "\n\n".join(part for part in (render_table(lines, style=style, titles=titles), "\n".join(notes)) if part)
