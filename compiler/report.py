"""What the compiler decided and what the runtime then did, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ub_overlap.runtime import plan_store
from ub_overlap.runtime.stats import SiteStats, site_stats

from .history import HISTORY
from .plan import Decision, Plan
from .summary import line


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedDecision(Decision):
    """A Decision with what happened to it at run time (None before its first call, and for sites left alone)."""

    plan: str
    """Digest of the plan it belongs to."""
    calls: int | None = None
    executed: str | None = None
    """The strategy that ran: the decided one, or "c10d" where the group turned out to have no transport."""
    transport: str | None = None
    bytes_copied: int | None = None
    bytes_beside_matmul: int | None = None
    """Bytes that really moved beside a matmul of the same call."""

    def to_dict(self) -> dict[str, Any]:
        own = ("plan", "calls", "executed", "transport", "bytes_copied", "bytes_beside_matmul")
        return {**super(ReportedDecision, self).to_dict(), **{k: getattr(self, k) for k in own}}


class Report:
    """The plans of one or more graphs, in the order in which they were compiled.

    `decisions`: every collective with its outcome; run-time figures are today's less those of `since` (earlier site_stats).
    """

    def __init__(self, plans: list[Plan], since: dict[str, SiteStats] | None = None) -> None:
        self.plans = plans
        self._since = since or {}

    @property
    def decisions(self) -> list[ReportedDecision]:
        now = site_stats()
        return [
            _reported(p, d, now.get(f"{p.digest}/{d.id}"), self._since.get(f"{p.digest}/{d.id}"))
            for p in self.plans
            for d in p.decisions
        ]

    @property
    def paths(self) -> list[Path]:
        """Where the plans are stored."""
        return [plan_store.path_of(p.digest) for p in self.plans]

    def summary(self) -> str:
        """One line a graph."""
        return "\n".join(line(p) for p in self.plans) or "no graph with collectives was compiled"

    def table(self) -> str:
        """A row a collective."""
        rows = []
        for d in self.decisions:
            shapes = dict(d.shapes)
            products = [v for k, v in shapes.items() if k.startswith("matmul")]
            rows.append(
                {
                    "site": d.id,
                    "kind": d.kind.value,
                    "module": d.module,
                    "shape": products[0] if products else shapes.get("input", ""),
                    "matmuls": len(products),
                    "group": f"{d.group} x{d.ranks}",
                    "bytes sent": d.bytes,
                    "strategy": str(d.strategy),
                    "calls": d.calls,
                    "hidden bytes / reason": d.reason.value if d.reason else _hidden(d),
                }
            )
        return tabulate(rows, headers="keys", tablefmt="simple", missingval="-")

    def to_json(self) -> str:
        return json.dumps(
            {"version": 1, "plans": [p.digest for p in self.plans], "sites": [d.to_dict() for d in self.decisions]}, indent=1
        )

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.table()}"


def _hidden(d: ReportedDecision) -> str:
    """The share of the bytes that moved beside a matmul."""
    return f"{d.bytes_beside_matmul / d.bytes_copied:.0%}" if d.bytes_copied and d.bytes_beside_matmul is not None else ""


def _reported(plan: Plan, d: Decision, now: SiteStats | None, before: SiteStats | None) -> ReportedDecision:
    base = {f.name: getattr(d, f.name) for f in fields(Decision)}
    calls = now.calls - (before.calls if before else 0) if now else 0
    if now is None or calls == 0:
        return ReportedDecision(**base, plan=plan.digest)
    copied, beside = (before.bytes_copied, before.bytes_beside_matmul) if before else (0, 0)
    return ReportedDecision(
        **base,
        plan=plan.digest,
        calls=calls,
        executed=now.strategy if now.transport != "c10d" else "c10d",
        transport=now.transport,
        bytes_copied=now.bytes_copied - copied,
        # Steps on a GPU are issued, not timed: what moved beside what is not known there.
        bytes_beside_matmul=None if now.transport == "symmetric memory" else now.bytes_beside_matmul - beside,
    )


def reports() -> Report:
    """Everything that this process compiled, and every plan that it ran out of a warm compile cache."""
    plans = {p.digest: p for p in HISTORY.plans()}
    ran = (site.partition("/")[0] for site in site_stats())
    plans |= {p.digest: p for p in HISTORY.found(d for d in ran if d not in plans)}
    return Report(list(plans.values()))
