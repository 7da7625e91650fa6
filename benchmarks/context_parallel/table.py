"""Table of a stored measurement of context parallelism. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table

KINDS = {"step": "fwd + bwd", "forward": "fwd", "step_g": "fwd + bwd (g)"}
BASELINE = "inductor"


def hidden(variants: dict[str, Any], name: str, kind: str) -> float | None:
    """Return the share of what Inductor takes over compute in the same form that a variant does not, None if unknown."""
    system, _, form = name.rpartition("_")
    found = (variants.get(v, {}).get(kind) for v in (f"{BASELINE}_{form}", "compute", name))
    theirs, alone, own = found
    if system in ("", BASELINE) or not theirs or not alone or not own or theirs <= alone:
        return None
    return (theirs - own) / (theirs - alone)


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return one table per size and sequence: ms, time over compute, share of Inductor's exposed time that is hidden."""
    parts = []
    for size in document["rows"]:
        variants = size["variants"]
        kinds = [kind for kind in KINDS if any(v.get(kind) for v in variants.values())]
        rows = []
        for name, v in variants.items():
            row = {f"{size['size']}, {size['layers']} layers, {size['seq']} tokens": name}
            for kind in kinds:
                ms, alone, share = v.get(kind), variants.get("compute", {}).get(kind), hidden(variants, name, kind)
                row[f"{KINDS[kind]} ms"] = f"{ms:.2f}" if ms else "-"
                row[f"over compute {kind}"] = f"{ms - alone:.2f}" if ms and alone and name != "compute" else "-"
                row[f"hidden {kind}"] = "-" if share is None else f"{100 * share:.0f}%"
            row["peak MiB"] = f"{v['peak_mib']:.0f}" if v.get("peak_mib") else "-"
            row["sites"] = v.get("sites") or "-"
            row["error"] = f"{v['error']:.1e}" if v.get("error") is not None else "-"
            rows.append(row)
        titles = {f"over compute {kind}": "over compute" for kind in kinds}
        titles |= {f"hidden {kind}": "of inductor's hidden" for kind in kinds}
        parts.append(render_table(rows, style=style, titles=titles))
        parts.append("\n".join(f"no {name} {kind}: {why}" for name, v in variants.items() for kind, why in v["why"].items()))
    return "\n\n".join(part for part in parts if part) or "no rows"
