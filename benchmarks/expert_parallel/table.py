"""Table of a stored measurement of expert parallelism. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table

KINDS = {"step": "fwd + bwd", "forward": "fwd", "step_g": "fwd + bwd (g)"}
BASELINE = "inductor"


def hidden(variants: dict[str, Any], name: str, kind: str) -> float | None:
    """Return the share of what Inductor takes over compute that a variant does not, None if unknown."""
    theirs, alone, own = (variants.get(v, {}).get(kind) for v in (BASELINE, "compute", name))
    if name in ("compute", BASELINE) or not theirs or not alone or not own or theirs <= alone:
        return None
    return (theirs - own) / (theirs - alone)


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return one table per layer: ms, time over compute, share of Inductor's exposed time that is hidden."""
    parts = []
    for row in document["rows"]:
        variants = row["variants"]
        kinds = [kind for kind in KINDS if any(v.get(kind) for v in variants.values())]
        title = f"{row['size']}, {row['layers']} layers, {row['tokens']} tokens, {row['own']} experts a rank, {row['routing']}"
        lines = []
        for name, v in variants.items():
            line = {title: name}
            for kind in kinds:
                ms, alone, share = v.get(kind), variants.get("compute", {}).get(kind), hidden(variants, name, kind)
                line[f"{KINDS[kind]} ms"] = f"{ms:.2f}" if ms else "-"
                line[f"over compute {kind}"] = f"{ms - alone:.2f}" if ms and alone and name != "compute" else "-"
                line[f"hidden {kind}"] = "-" if share is None else f"{100 * share:.0f}%"
            line["peak MiB"] = f"{v['peak_mib']:.0f}" if v.get("peak_mib") else "-"
            line["sites"] = v.get("sites") or "-"
            line["error"] = f"{v['error']:.1e}" if v.get("error") is not None else "-"
            lines.append(line)
        titles = {f"over compute {kind}": "over compute" for kind in kinds}
        titles |= {f"hidden {kind}": "of inductor's hidden" for kind in kinds}
        parts.append(render_table(lines, style=style, titles=titles))
        parts.append("\n".join(f"no {name} {kind}: {why}" for name, v in variants.items() for kind, why in v["why"].items()))
    return "\n\n".join(part for part in parts if part) or "no rows"
