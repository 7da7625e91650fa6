"""Reports: the decisions of the compiler and the figures of the runtime."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ub_overlap.runtime import plan_store, verify
from ub_overlap.runtime.autotune import TunedStrategy, tuned_strategies
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.runtime.stats import SiteStats, site_stats

from ..cost.profile import Profile
from ..cost.profile_lookup import load, of_plan
from ..diff.edits import Diff
from ..diff.graph_store import STORE, PlanGraphs
from ..plan.decision import CastDecision, Decision
from ..plan.plan import Plan
from ..plan.strategy import NONE, DispatchTable
from ..text.short_line import short_line
from ..text.table import render_table
from ..tokens.token_split import TokenSplit
from . import timeline
from .history import HISTORY
from .measured import Measured
from .outlook import Outlook, outlook, totals
from .summary import format_plan
from .what_next import WhatNext, copied_bytes, find_exposed

OPTIONAL_COLUMNS = (
    "shape", "group", "matmuls", "bytes saved", "bytes sent", "line", "calls", "comm us", "matmul us", "gain us", "tuned",
    "predicted us", "module",
)  # fmt: skip
"""Columns of `Report.table` that a narrow terminal does not need, least important first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedDecision(Decision):
    """A Decision with its run-time figures, which are None before the first call and for sites left alone."""

    plan: str
    """Digest of the plan."""
    predicted_by: str = ""
    """The profile of `outlook`."""
    calls: int | None = None
    executed: str | None = None
    """The strategy of the last call, or "c10d" if the group has no transport."""
    calls_by_strategy: tuple[tuple[str, int], ...] = ()
    """(strategy, calls). Several if the site has a dispatch table or autotunes."""
    tuned: tuple[tuple[str, TunedStrategy], ...] = ()
    """With autotune=True, (rows, what was measured and selected) of each bucket; "*" for any number of rows."""
    transport: str | None = None
    bytes_copied: int | None = None
    bytes_overlapped: int | None = None
    """Bytes that were copied concurrently with a matmul of the same call."""
    outlook: Outlook | None = None
    """Predicted times; None if the cost model does not cover the site."""
    error: float | None = None
    """With options={"verify": True}: the largest difference from the unfused ops, relative to the amax of their result."""
    measured_us: float | None = None
    """The time of one call, median over a few; None without explain(..., measure=True)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the decision and its figures as plain data."""
        own = (
            "plan", "predicted_by", "calls", "executed", "transport", "bytes_copied", "bytes_overlapped", "measured_us",
            "error",
        )  # fmt: skip
        predicted = self.outlook.to_dict() if self.outlook else dict.fromkeys(Outlook.FIELDS)
        picked = {
            "calls_by_strategy": dict(self.calls_by_strategy),
            "tuned": {rows: times.to_dict() for rows, times in self.tuned},
        }
        return {**super(ReportedDecision, self).to_dict(), **{k: getattr(self, k) for k in own}, **picked, **predicted}


@dataclass(frozen=True)
class ReportedCast(CastDecision):
    """A CastDecision with its measured error."""

    error: float | None = None
    """||float8 - 16 bits|| / ||16 bits|| of this rank's matmul, of the worst call.

    Measured with options={"verify": True} or explain(..., measure=True), else None.
    """


class Report:
    """The plans of one or more graphs, in the order of their compilation.

    `since`: earlier site_stats, which are subtracted from the run-time figures. `profile`: the profile of predictions for
    plans whose own profile is not available; None is this machine's. `measured`: times by "<plan digest>/<site id>".
    `float8`: errors by CastDecision.key; None is those of this process so far. `token_splits`: of tokenwise layers.
    """

    def __init__(
        self,
        plans: list[Plan],
        since: dict[str, SiteStats] | None = None,
        profile: Profile | None = None,
        measured: dict[str, Measured] | None = None,
        float8: dict[str, verify.SiteError] | None = None,
        token_splits: Sequence[TokenSplit] = (),
    ) -> None:
        self.plans = plans
        self.token_splits = tuple(token_splits)
        self._since = since or {}
        self._profile = profile
        self._measured = measured or {}
        self._float8 = float8

    @property
    def profile(self) -> Profile:
        """The profile of predictions for plans that name none, or one that is not available."""
        if self._profile is None:
            self._profile = load(None, max((d.ranks for p in self.plans for d in p.decisions), default=0) or None)
        return self._profile

    def profile_of(self, plan: Plan, d: Decision) -> Profile:
        """Return the profile of a decision's predictions."""
        return of_plan(plan.profile, d.ranks) or self.profile

    @property
    def decisions(self) -> list[ReportedDecision]:
        """Every collective with its decision and run-time figures."""
        now, errors = site_stats(), verify.ERRORS.by_site()
        return [
            _reported(
                p, d, now.get(site), self._since.get(site), self.profile_of(p, d), self._measured.get(site), errors.get(site)
            )
            for p in self.plans
            for d in p.decisions
            for site in (str(SiteId(p.digest, d.id)),)
        ]

    @property
    def casts(self) -> list[ReportedCast]:
        """Every matmul of a linear that the float8 pass examined."""
        errors = verify.FLOAT8.by_site() if self._float8 is None else self._float8

        def reported(c: CastDecision) -> ReportedCast:
            known = {f.name: getattr(c, f.name) for f in fields(CastDecision)}
            return ReportedCast(**known, error=errors[c.key].error if c.recipe and c.key in errors else None)

        return [reported(c) for p in self.plans for c in p.casts]

    @property
    def paths(self) -> list[Path]:
        """The files of the stored plans; none without a folder to store them."""
        try:
            plan_store.directory()
        except FileNotFoundError:
            return []
        return [plan_store.path_of(p.digest) for p in self.plans]

    def summary(self) -> str:
        """Return one line per graph, and per tokenwise layer."""
        lines = [format_plan(p) for p in self.plans] or ["no graph with collectives was compiled"]
        return "\n".join([*lines, *map(str, self.token_splits)])

    def table(self, width: int | None = None) -> str:
        """Return a table with one row per collective. `width`: the limit of a line; columns that do not fit are left out."""
        return render_table(self.rows(), width=width, optional=OPTIONAL_COLUMNS)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `table`: one dict per collective."""
        rows, decisions = [], self.decisions
        verified = any(d.error is not None for d in decisions)
        for d in decisions:
            shapes = dict(d.shapes)
            matmuls = [v for k, v in shapes.items() if k.startswith("matmul")]
            rows.append(
                {
                    "site": d.id,
                    "kind": d.kind.value,
                    "module": d.module,
                    "line": short_line(d.source),
                    "shape": matmuls[0] if matmuls else shapes.get("input", ""),
                    "matmuls": len(matmuls),
                    "group": f"{d.group} x{d.ranks}",
                    "bytes sent": d.bytes,
                    **({"bytes saved": d.saved_bytes} if any(d.saved_bytes for d in decisions) else {}),
                    "matmul us": _us(d.outlook.none.matmul_us if d.outlook else None),
                    "comm us": _us(d.outlook.none.communication_us if d.outlook else None),
                    "predicted us": d.outlook.times() if d.outlook else None,
                    "strategy": str(d.strategy),
                    **({"tuned": _tuned_column(d)} if any(d.tuned for d in decisions) else {}),
                    "gain us": _us(d.outlook.gain_us if d.outlook else None),
                    **({"measured us": _us(d.measured_us)} if self._measured else {}),
                    **(
                        {"error": None if d.error is None else _error(d.error, d.sent_dtype if d.rounds else d.dtype)}
                        if verified
                        else {}
                    ),
                    "calls": d.calls,
                    "hidden bytes / reason": d.reason.value if d.reason else _hidden(d),
                }
            )
        return rows

    def float8(self) -> str:
        """Return a table with one row per matmul that the float8 pass examined, largest error first; "" without any."""
        return render_table(self._float8_rows())

    def _float8_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "module": c.module,
                "product": c.role,
                "shape": c.shape,
                "recipe / reason": c.recipe or (c.reason.value if c.reason else ""),
                "error": None if c.error is None else f"{c.error:.1e}",
            }
            for c in sorted(self.casts, key=lambda c: -(c.error if c.error is not None else -1.0))
        ]

    def totals(self) -> str:
        """Return the predicted times of all sites together, and what was measured: times, and bytes copied during a matmul."""
        decisions = self.decisions
        used = dict.fromkeys(str(self.profile_of(p, d)) for p in self.plans for d in p.decisions)
        text = f"profile {', '.join(used)}; {totals([d.outlook for d in decisions])}"
        missing = dict.fromkeys(
            p.profile for p in self.plans for d in p.decisions if p.profile and not of_plan(p.profile, d.ranks)
        )
        if missing:
            text += f"; the decisions use {', '.join(missing)}, which is not available"
        measured = [d for d in decisions if d.measured_us is not None and d.outlook is not None]
        if measured:
            predicted, took = (
                sum(d.outlook.chosen.us for d in measured if d.outlook),
                sum(d.measured_us or 0.0 for d in measured),
            )
            text += f"; {len(measured)} measured sites took {took:.0f} us, predicted {predicted:.0f} us"
        return text + _copied_during_matmuls(decisions)

    def metrics(self, prefix: str = "ub_overlap/") -> dict[str, float]:
        """Return numbers by name, for loggers such as W&B or TensorBoard: counts, bytes, and predicted microseconds."""
        decisions = self.decisions
        predicted = totals([d.outlook for d in decisions])
        copied, during = copied_bytes((d.bytes_copied, d.bytes_overlapped) for d in decisions)
        found = {
            "graphs": len(self.plans),
            "collectives": len(decisions),
            "overlapped": sum(d.overlapped for d in decisions),
            "calls": sum(d.calls or 0 for d in decisions),
            "bytes_copied": copied,
            "bytes_copied_during_matmuls": during,
            "predicted_us": predicted.chosen_us,
            "predicted_without_overlap_us": predicted.none_us,
            "predicted_exposed_us": sum(d.outlook.exposed_us for d in decisions if d.outlook),
        }
        return {prefix + name: float(value) for name, value in found.items()}

    def what_next(self) -> WhatNext:
        """Return the collectives that still expose communication, with the reason and the option to paste of each."""
        return find_exposed([d.to_dict() for d in self.decisions])

    def timeline(self, path: str | Path, site: str | None = None, predicted: bool = True, measured: bool = True) -> Path:
        """Write the steps of one site, or of all in order, predicted and (after explain(..., measure=True)) measured.

        A .png needs matplotlib; other files are JSON for chrome://tracing or ui.perfetto.dev. OptionError for an unknown
        site, or if there is nothing to show.
        """
        lanes = []
        for plan in self.plans:
            for d in plan.decisions:
                full_id = str(SiteId(plan.digest, d.id))
                if site not in (None, d.id, full_id):
                    continue
                if predicted and (o := outlook(d, self.profile_of(plan, d))) is not None:
                    lanes.append(timeline.predicted_lane(d.id, o.chosen))
                if measured and (m := self._measured.get(full_id)) is not None:
                    lanes.append(timeline.measured_lane(d.id, m))
        if site is not None and not lanes:
            ids = ", ".join(d.id for p in self.plans for d in p.decisions)
            raise OptionError("no such site, or no times of it", where="timeline", got=site, expected=f"one of {ids}")
        return timeline.write_timeline(path, lanes)

    @property
    def graphs(self) -> list[PlanGraphs]:
        """The stored graphs of the plans, before and after the rewrite. None are stored with UB_OVERLAP_SNAPSHOTS=0."""
        return [g for p in self.plans if (g := STORE.find(p.digest)) is not None]

    @property
    def diff(self) -> list[Diff]:
        """The changes: a Diff per graph, and one more if the joint graph was changed before it was partitioned."""
        return [d for g in self.graphs for d in (g.joint_diff(), g.diff()) if d is not None]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, which `python -m ub_overlap explain` and `diff` read."""
        sites = [d.to_dict() for d in self.decisions]
        return {
            "version": 1,
            "plans": [p.digest for p in self.plans],
            "profiles": {p.digest: p.profile for p in self.plans},
            "profile": str(self.profile) if self.plans else "",
            "summary": self.summary(),
            "totals": self.totals() if self.plans else "",
            "sites": sites,
            "what_next": find_exposed(sites).to_dict(),
            "casts": [c.to_dict() for c in self.casts],
            "token_splits": [t.to_dict() for t in self.token_splits],
            "lanes": self._lanes(),
            "graphs": [g.to_dict() for g in self.graphs],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def to_html(self, path: str | Path, title: str = "report") -> Path:
        """Write a self-contained HTML page: both graphs side by side, sites, reasons, predictions, schedules."""
        from ..diff.render import html

        return html.write(path, self.to_dict(), title)

    def _lanes(self) -> dict[str, list[dict[str, Any]]]:
        """The steps of each site by "<plan digest>/<site id>": without overlap, as decided, and as measured."""
        lanes_by_site: dict[str, list[dict[str, Any]]] = {}
        for plan in self.plans:
            for d in plan.decisions:
                site = str(SiteId(plan.digest, d.id))
                if lanes := lanes_of(d.id, outlook(d, self.profile_of(plan, d)), self._measured.get(site)):
                    lanes_by_site[site] = lanes
        return lanes_by_site

    def _repr_html_(self) -> str:
        """Return the report for a notebook: summary, sites, reasons and edits."""
        from ..diff.render.notebook import Section, render_notebook

        left = [
            {"site": d.id, "kind": d.kind.value, "reason": d.reason.value, "detail": d.detail, "source": d.source}
            for d in self.decisions
            if d.reason
        ]
        sections = [Section(self.summary(), self.rows(), self.totals() if self.plans else "")]
        sections += [Section(f"left alone: {len(left)}", left, is_open=False)] if left else []
        sections += [Section(d.heading(), d.rows(), is_open=False) for d in self.diff]
        sections += [Section(f"float8: {len(rows)} matmuls", rows, is_open=False)] if (rows := self._float8_rows()) else []
        return render_notebook(sections)

    def __repr__(self) -> str:
        return self.summary()

    def __str__(self) -> str:
        if not self.plans:
            return self.summary()
        errors = self.float8() if any(c.error is not None for c in self.casts) else ""
        return "\n".join(filter(None, (self.summary(), self.table(), self.totals(), self.what_next().text(), errors)))


def lanes_of(site: str, predicted: Outlook | None, measured: Measured | None = None) -> list[dict[str, Any]]:
    """Return the steps of a site as plain data: without overlap, as decided, and as measured."""
    lanes = [timeline.predicted_lane(site, predicted.none, "predicted, none")] if predicted else []
    if predicted and predicted.chosen is not predicted.none:
        lanes.append(timeline.predicted_lane(site, predicted.chosen, f"predicted, {predicted.decided}"))
    if measured is not None:
        lanes.append(timeline.measured_lane(site, measured))
    return [lane.to_dict() for lane in lanes]


def _hidden(d: ReportedDecision) -> str:
    """The share of the bytes that were copied concurrently with compute; of a split site that was not timed, the plan's."""
    if d.bytes_copied and d.bytes_overlapped is not None:
        return f"{d.bytes_overlapped / d.bytes_copied:.0%}"
    return f"{d.window.hidden:.0%} planned" if d.window else ""


def _copied_during_matmuls(decisions: Sequence[ReportedDecision]) -> str:
    """Return "; measured: 67% of 1024 bytes copied during a matmul", "" before the first call and where steps are not timed."""
    copied, during = copied_bytes((d.bytes_copied, d.bytes_overlapped) for d in decisions)
    return f"; measured: {during / copied:.0%} of {copied} bytes copied during a matmul" if copied else ""


def _tuned(plan: Plan, d: Decision) -> tuple[tuple[str, TunedStrategy], ...]:
    """The measurements of a site, by the limits of its dispatch table."""
    measurements = tuned_strategies(str(SiteId(plan.digest, d.id)))
    limits = [b.limit for b in d.strategy.buckets] if isinstance(d.strategy, DispatchTable) else []
    return tuple(("*" if limits[n] is None else str(limits[n]), measurements[n]) for n in sorted(measurements))


def _tuned_column(d: ReportedDecision) -> str | None:
    """The column of measurements: "none 12, pipelined 9 us measured: pipelined"."""
    return "; ".join(str(t) if rows == "*" else f"{rows} rows: {t}" for rows, t in d.tuned) or None


def _error(value: float, dtype: str) -> str:
    return f"{value:.1e}" + ("" if value <= verify.tolerance(dtype) else " BAD")


def _us(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _reported(
    plan: Plan,
    d: Decision,
    now: SiteStats | None,
    before: SiteStats | None,
    profile: Profile,
    measured: Measured | None,
    error: verify.SiteError | None,
) -> ReportedDecision:
    base: dict[str, Any] = {f.name: getattr(d, f.name) for f in fields(Decision)}
    predicted = outlook(d, profile)
    base |= {"outlook": predicted, "measured_us": measured.us if measured else None, "tuned": _tuned(plan, d)}
    base |= {"predicted_by": str(profile) if predicted else "", "error": error.error if error else None}
    calls = now.calls - (before.calls if before else 0) if now else 0
    if now is None or calls == 0:
        return ReportedDecision(**base, plan=plan.digest)
    earlier = before.strategies if before else {}
    copied, concurrent = (before.bytes_copied, before.bytes_overlapped) if before else (0, 0)
    return ReportedDecision(
        **base,
        plan=plan.digest,
        calls=calls,
        executed="c10d" if now.transport == "c10d" and now.strategy != str(NONE) else now.strategy,
        calls_by_strategy=tuple((s, n) for s, count in now.strategies.items() if (n := count - earlier.get(s, 0))),
        transport=now.transport,
        bytes_copied=now.bytes_copied - copied,
        # Steps on a GPU are issued, not timed, so their concurrency is unknown.
        bytes_overlapped=None if now.transport == "symmetric memory" else now.bytes_overlapped - concurrent,
    )


def reports() -> Report:
    """Return a report of all graphs that this process compiled or ran from a warm compile cache."""
    plans = {p.digest: p for p in HISTORY.plans()}
    ran = (SiteId.parse(site).digest for site in site_stats())
    plans |= {p.digest: p for p in HISTORY.find_all(d for d in ran if d not in plans and plan_store.is_digest(d))}
    return Report(list(plans.values()), token_splits=HISTORY.token_splits())
