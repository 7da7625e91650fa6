"""Kinds of the steps of a schedule, as timelines and pages color them."""

from __future__ import annotations

from .reasons import COLLECTIVES

COLORS = {"matmul": "#4878d0", "copy": "#ee854a", "collective": "#d65f5f", "reduce": "#6acc64", "other_step": "#c0c0c0"}
"""By kind; variables of page.css have the same names."""
LABELS = {**{kind: kind for kind in COLORS}, "other_step": "wait, others"}
"""Of legends, by kind."""


def step_kind(text: str) -> str:
    """Return the kind of a step, one of COLORS, by the first word of its text."""
    word = text.lower().partition(" ")[0]
    if word in COLLECTIVES:
        return "collective"
    return "matmul" if word == "compute" else word if word in COLORS else "other_step"
