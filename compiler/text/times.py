"""Predicted times of a site as a cell of a table."""

from __future__ import annotations

from collections.abc import Mapping

from .table import Abbreviated


def format_times(us_by_strategy: Mapping[str, float], decided: str) -> Abbreviated:
    """Return "none 615, pipelined 432"; in a narrow table "615 -> 432", or "615" where `decided` is no overlap."""
    text = ", ".join(f"{strategy} {us:.0f}" for strategy, us in us_by_strategy.items())
    shown = dict.fromkeys(("none", decided))
    return Abbreviated(text, " -> ".join(f"{us_by_strategy[s]:.0f}" for s in shown if s in us_by_strategy))
