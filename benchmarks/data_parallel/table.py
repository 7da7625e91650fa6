"""Table of a stored measurement of data parallelism. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table

from .. import waterfall

KINDS = {"step": "fwd + bwd", "forward": "fwd", "step_g": "fwd + bwd (g)", "forward_g": "fwd (g)"}
BASELINE = "fsdp2"


def hidden(variants: dict[str, Any], name: str, kind: str) -> float | None:
    """Return the share of what FSDP2 takes over compute that a variant does not, None if unknown."""
    theirs, alone, mine = (variants.get(v, {}).get(kind) for v in (BASELINE, "compute", name))
    if name in (BASELINE, "compute") or not theirs or not alone or not mine or theirs <= alone:
        return None
    return (theirs - mine) / (theirs - alone)


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return one table per size: ms, time over compute, share of FSDP2's exposed time that is hidden, peak memory.

    Then the waterfall of its captured steps, where it was measured."""
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
            if any(one.get("arena_mib") for one in variants.values()):
                row["landing MiB so far"] = f"{v.get('arena_mib', 0):.0f}"
            row["sites"] = v.get("sites") or "-"
            row["error"] = f"{v['error']:.1e}" if v.get("error") is not None else "-"
            rows.append(row)
        titles = {f"over compute {kind}": "over compute" for kind in kinds}
        titles |= {f"hidden {kind}": "of fsdp2's hidden" for kind in kinds}
        parts.append(render_table(rows, style=style, titles=titles))
        notes = [f"no {name} {kind}: {why}" for name, v in variants.items() for kind, why in v.get("why", {}).items()]
        parts.append("\n".join(notes))
        if "waterfall" in size:
            rank = size["waterfall"].get("rank", 0)
            parts.append(f"captured step of {size['layers']} {size['size']} blocks, microseconds by class, rank {rank}")
            parts.append(waterfall.text(size["waterfall"], style))
    return "\n\n".join(part for part in parts if part) or "no rows"
