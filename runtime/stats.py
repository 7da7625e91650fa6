"""Statistics of the ops by site, counted in C++ at every call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class SiteStats:
    """Totals of one site in this process."""

    calls: int
    strategy: str
    """Of the last call: "pipelined", "bulk:chunks=4", ..."""
    transport: str
    """Transport of the last call: "shared memory", "symmetric memory", "local" (a group of one rank), or "c10d" (plain
    collective, then matmul) where the ranks share no memory or the dispatch table chose it."""
    bytes_copied: int
    """Bytes that this rank pushed to its peers."""
    bytes_overlapped: int
    """The part of them that moved while a matmul of the same call ran, by the steps' clocks."""
    strategies: Mapping[str, int] = field(default_factory=dict)
    """Calls by strategy: several where the site has a dispatch table or alternatives."""
    reason: str = ""
    """Why the last call ran over c10d: "none by size", "none by measurement", or why the group has no other transport."""


def site_stats() -> dict[str, SiteStats]:
    """Return the totals since process start by site ("<plan digest>/<site id>"). Empty before the extension is loaded."""
    from ub_overlap.runtime import ops

    names = {f.name for f in fields(SiteStats)}
    rows: dict[str, dict[str, Any]] = ops.load().site_stats()
    return {site: SiteStats(**{k: v for k, v in row.items() if k in names}) for site, row in rows.items()}
