"""Tables of a stored measurement of blocks. No torch is needed."""

from __future__ import annotations

from typing import Any

from ub_overlap.compiler.text.table import render_table

from .. import waterfall
from . import host

NONE = "-"
NO_COMMUNICATION = "nocomm"
BASELINES = ("compute", NO_COMMUNICATION)
"""Variants without communication. Their results have no meaning."""
KINDS = {"step": "fwd + bwd", "forward": "fwd", "step_g": "fwd + bwd (g)", "forward_g": "fwd (g)"}


def hidden(variants: dict[str, Any], name: str, kind: str) -> float | None:
    """Return the share of the exposed communication (inductor minus compute) that a variant hides, None if unknown."""
    times = [variants.get(v, {}).get(kind) for v in ("inductor", "compute", name)]
    if name in ("inductor", *BASELINES) or not all(times) or times[0] <= times[1]:
        return None
    return (times[0] - times[2]) / (times[0] - times[1])


def over_compute(variants: dict[str, Any], name: str, kind: str) -> float | None:
    """Return the milliseconds that a variant takes more than compute, None if unknown."""
    mine, alone = (variants.get(v, {}).get(kind) for v in (name, "compute"))
    return mine - alone if mine and alone and name != "compute" else None


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f}%"


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def text(document: dict[str, Any], style: str = "simple") -> str:
    """Return one table per size: ms, speed-up over the better of inductor and async-TP, share hidden, peak memory of a step.
    Without the variants of torch: the time over compute.

    Then the waterfall of its captured steps, where it was measured."""
    parts = [document.get("mirror", "")]
    for size in document["rows"]:
        variants = size["variants"]
        model = size.get("model", "block")
        blocks = model if size.get("layers", 1) == 1 else f"{size['layers']} {model}s"
        kinds = [kind for kind in KINDS if any(v.get(kind) for v in variants.values())]
        titles = {f"gain {kind}": "x best of torch" for kind in kinds} | {f"hidden {kind}": "hidden" for kind in kinds}
        titles |= {f"over {kind}": "over compute" for kind in kinds}
        has_torch = any(name in variants for name in ("inductor", "asynctp"))
        rows = []
        for name, v in variants.items():
            row = {f"{size['size']} {blocks}, {size['seq']} tokens": name}
            for kind in kinds:
                torch_s = [variants[t][kind] for t in ("inductor", "asynctp") if variants.get(t, {}).get(kind)]
                gain = min(torch_s) / v[kind] if torch_s and v.get(kind) else None
                row[f"{KINDS[kind]} ms"] = number(v.get(kind))
                if has_torch:
                    row |= {f"gain {kind}": number(gain), f"hidden {kind}": share(hidden(variants, name, kind))}
                else:
                    row[f"over {kind}"] = number(over_compute(variants, name, kind))
            rows.append({**row, "peak MiB": number(v.get("peak_mib"), 0), "sites": v.get("sites") or ""})
        parts.append(render_table(rows, style=style, titles=titles))
        notes = [f"no {name} {what}: {why}" for name, v in variants.items() for what, why in v.get("why", {}).items()]
        parts.append("\n".join(notes))
        if any("host" in v for v in variants.values()):
            parts.append(host.text(variants, style))
        parts.extend(waterfall.section(size, f"the {size['size']} {blocks}", style))
    return "\n\n".join(part for part in parts if part) or "no rows"
