"""Calls of split collectives in the code that Inductor generates, and in the plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def matching_lines(programs: Iterable[str], pattern: str) -> list[list[re.Match[str]]]:
    """Return of each program the matches of its lines, in order."""
    return [[m for m in map(re.compile(pattern).search, text.splitlines()) if m] for text in programs]


def planned_calls(decisions: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return "start ID", "finish ID" and "release ID" of split sites of one graph (`Decision.to_dict`), in the plan's order."""
    windows = [(d["id"], d["window"]) for d in decisions]
    places = {
        window[field]: f"{call} {name}"
        for name, window in windows
        for call, field in (("start", "starts"), ("finish", "finishes"), ("release", "releases"))
        if window[field] is not None
    }
    return [text for _, text in sorted(places.items())]
