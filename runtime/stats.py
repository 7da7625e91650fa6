"""What the ops did, by site: counted in C++ at every call, read here."""

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
    """What ran it: "shared memory", "local" (a group of one rank), or "c10d" (plain collective, then matmul) where the ranks
    share no memory, or where that is what was picked."""
    bytes_copied: int
    """Bytes that this rank pushed to its peers."""
    bytes_beside_matmul: int
    """Those of them that moved while a matmul of the same call ran, by the steps' own clocks."""
    strategies: Mapping[str, int] = field(default_factory=dict)
    """Calls by the strategy that ran them: several where the site has a table of sizes, or alternatives."""
    reason: str = ""
    """Why the last call ran over c10d: "none by size", "none by measurement", or why the group has no transport of ours."""


def site_stats() -> dict[str, SiteStats]:
    """Site ("<plan digest>/<site id>") -> totals since the process began. Empty before the extension is loaded."""
    from ub_overlap.runtime import ops

    names = {f.name for f in fields(SiteStats)}
    rows: dict[str, dict[str, Any]] = ops.load().site_stats()
    return {site: SiteStats(**{k: v for k, v in row.items() if k in names}) for site, row in rows.items()}
