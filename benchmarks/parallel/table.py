"""Tables of stored measurements: what each variant adds to the compute. No torch is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ub_overlap.compiler.text.table import render_table

from ..waterfall import communication_us

KINDS = {
    "step": "fwd + bwd",
    "step_s": "fwd + bwd, steady",
    "forward": "fwd",
    "step_g": "fwd + bwd (g)",
    "forward_g": "fwd (g)",
}
COMPUTE = "compute"


def hidden(variants: dict[str, Any], name: str, kind: str, baseline: str) -> float | None:
    """Return the share of what `baseline` takes over compute that a variant does not, None if unknown."""
    theirs, alone, own = (variants.get(v, {}).get(kind) for v in (baseline, COMPUTE, name))
    if name in (baseline, COMPUTE) or not theirs or not alone or not own or theirs <= alone:
        return None
    return (theirs - own) / (theirs - alone)


def predicted_columns(row: dict[str, Any], name: str, baseline: str) -> dict[str, str]:
    """Return the milliseconds of communication that a profiled step exposes, hides of the baseline's, and was predicted to."""
    predicted = row["variants"][name].get("predicted", {})
    profiled = {n: communication_us(entry) for n, entry in row.get("waterfall", {}).get("variants", {}).items()}
    theirs, own = profiled.get(baseline), profiled.get(name)
    hides = (theirs - own) / 1e3 if predicted and theirs is not None and own is not None else None
    columns = {
        "exposed": None if own is None else own / 1e3,
        "exposed predicted": predicted.get("exposed_ms"),
        "hides": hides,
        "hides predicted": predicted.get("saved_ms"),
    }
    return {key: "-" if ms is None else f"{ms:.2f}" for key, ms in columns.items()}


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
            line |= predicted_columns(row, name, baseline_of(name))
        line["peak MiB"] = f"{v['peak_mib']:.0f}" if v.get("peak_mib") else "-"
        if any(one.get("arena_mib") for one in variants.values()):
            line["landing MiB so far"] = f"{v.get('arena_mib', 0):.0f}"
        if any(one.get("sm_mhz") for one in variants.values()):
            line |= {"SM MHz": f"{v['sm_mhz']:.0f}", "W": f"{v['watts']:.0f}"} if v.get("sm_mhz") else {"SM MHz": "-", "W": "-"}
        line["sites"] = v.get("sites") or "-"
        line["error"] = f"{v['error']:.1e}" if v.get("error") is not None else "-"
        lines.append(line)
    titles = {f"over compute {kind}": "over compute" for kind in kinds}
    titles |= {f"hidden {kind}": f"of {what}'s hidden" for kind in kinds}
    titles |= {"exposed": "exposed, profiled", "exposed predicted": "predicted"}
    titles |= {"hides": f"{what}'s hidden, profiled", "hides predicted": "predicted"}
    notes = [
        f"{name}: no prediction of {v['predicted']['unknown']} collectives"
        for name, v in variants.items() if has_predictions and v.get("predicted", {}).get("unknown")
    ]  # fmt: skip
    notes += [f"{name} sets {json.dumps(v['settings'])}" for name, v in variants.items() if v.get("settings")]
    notes += [f"no {name} {kind}: {why}" for name, v in variants.items() for kind, why in v.get("why", {}).items()]
    return "\n\n".join(part for part in (render_table(lines, style=style, titles=titles), "\n".join(notes)) if part)
