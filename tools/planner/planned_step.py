"""Predict the step of a block by site, with totals: as text, as JSON, and as a plan for options={"overrides": path}."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.cost.profile_lookup import load
from ub_overlap.compiler.diff.graph_store import PlanGraphs
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import collective_of
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.compiler.reports import timeline
from ub_overlap.compiler.reports.outlook import Outlook, Totals, outlook, totals
from ub_overlap.compiler.reports.report import lanes_of
from ub_overlap.compiler.reports.summary import format_plan
from ub_overlap.compiler.text.table import render_table
from ub_overlap.compiler.tokens.choose_halves import MARGIN
from ub_overlap.runtime.site_id import SiteId

from .sizes import PlannedBlock
from .trace import trace


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One site and its prediction, None without one."""

    site: Decision
    outlook: Outlook | None
    parallelism: str = ""
    """The kind of parallelism of its group: "TP"."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The predicted step. `rest`: microseconds of work outside of sites, by kind of work."""

    sizes: PlannedBlock
    profile: Profile
    rows: tuple[PlanRow, ...]
    plans: tuple[Plan, ...]
    rest: dict[str, float]
    graph_us: tuple[float, ...] = ()
    """Microseconds of each graph as chosen: of the forward, the backward; or of its two parts."""
    graphs: tuple[PlanGraphs, ...] = ()
    """Graphs before and after the rewrite, if requested."""
    forms_us: dict[str, float] = field(default_factory=dict)
    """Microseconds of the step with the tokens of experts "whole" and in "halves", where both were predicted."""

    @property
    def totals(self) -> Totals:
        """Totals over all sites."""
        return totals([r.outlook for r in self.rows])

    @property
    def exposed_us(self) -> dict[str, tuple[float, float]]:
        """By kind of parallelism the microseconds of communication, and of that what is exposed as chosen."""
        found: dict[str, tuple[float, float]] = {}
        for r in self.rows:
            if r.outlook is not None:
                before, exposed = found.get(r.parallelism, (0.0, 0.0))
                found[r.parallelism] = before + r.outlook.none.communication_us, exposed + r.outlook.exposed_us
        return found

    @property
    def none_us(self) -> float:
        """Microseconds of the step without overlap."""
        return self.totals.none_us + sum(self.rest.values())

    @property
    def chosen_us(self) -> float:
        """Microseconds of the step with the chosen strategies."""
        return self.totals.chosen_us + sum(self.rest.values())

    def saved_plan(self) -> str:
        """Return JSON for options={"overrides": path}: the sites of all graphs with the chosen strategies."""
        rows = [{**d.to_dict(), "plan": p.digest} for p in self.plans for d in p.decisions]
        return json.dumps({"version": 1, "plans": [p.digest for p in self.plans], "sites": rows}, indent=1)

    def to_json(self) -> str:
        """Return the prediction as JSON."""
        sites = [
            {**r.site.to_dict(), "parallelism": r.parallelism, **(r.outlook.to_dict() if r.outlook else {})} for r in self.rows
        ]
        names = ("communication_us", "exposed_us")
        exposed = {name: dict(zip(names, times, strict=True)) for name, times in self.exposed_us.items()}
        step = {"none_us": self.none_us, "chosen_us": self.chosen_us, "rest_us": self.rest}
        return json.dumps(
            {
                "version": 1,
                "block": asdict(self.sizes),
                "profile": {"name": self.profile.name, "digest": self.profile.digest},
                "sites": sites,
                "totals": self.totals.to_dict(),
                "exposed": exposed,
                "step": step,
                **({"tokens_us": self.forms_us} if self.forms_us else {}),
            },
            indent=1,
        )

    def to_html(self, path: str | Path, figure: str = "") -> Path:
        """Write a self-contained HTML page, like Report.to_html. `figure`: HTML to put above the graphs."""
        from ub_overlap.compiler.diff.render import html

        rows = iter(self.rows)
        sites, lanes = [], {}
        for plan in self.plans:
            for _ in plan.decisions:
                row = next(rows)
                sites.append({**row.site.to_dict(), "plan": plan.digest, **(row.outlook.to_dict() if row.outlook else {})})
                lanes[str(SiteId(plan.digest, row.site.id))] = lanes_of(row.site.id, row.outlook)
        report = {
            "sites": sites, "lanes": lanes, "graphs": [g.to_dict() for g in self.graphs], "profile": str(self.profile),
            "summary": "\n".join(map(format_plan, self.plans)), "totals": str(self.totals),
        }  # fmt: skip
        s = self.sizes
        return html.write(path, report, f"plan: hidden {s.hidden}, {s.seq} tokens, {parallelism(s)}, {s.dtype}", figure)

    def timeline(self, path: str | Path) -> Path:
        """Write the predicted steps of all sites: .png (needs matplotlib), else JSON for chrome://tracing."""
        return timeline.write_timeline(
            path, [timeline.predicted_lane(r.site.id, r.outlook.chosen) for r in self.rows if r.outlook]
        )

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the prediction as text. `width`: of its table; columns that do not fit are left out."""
        return f"{self._heading()}\n\n{table(self.rows, width)}\n{LEGEND}\n\n{self._closing()}"

    def _repr_html_(self) -> str:
        """Return the prediction for a notebook."""
        from ub_overlap.compiler.diff.render.notebook import Section, render_notebook

        return render_notebook([Section(self._heading(), table_rows(self.rows), f"{LEGEND}\n{self._closing()}", floats=".0f")])

    def _heading(self) -> str:
        s = self.sizes
        experts = f", {s.experts} experts, {s.experts_per_token} of a token" if s.experts > 1 else ""
        experts += " in two halves" if s.halves else ""
        shared = f", shared {s.shared_ffn}" if s.shared_ffn else ""
        return (
            f"hidden {s.hidden}, ffn {s.ffn}{experts}{shared}, heads {s.heads} (kv {s.kv_heads}), "
            f"batch {s.batch} x {s.seq} tokens, {s.dtype}, {parallelism(s)}, layers {s.layers}, forward + backward; "
            f"profile {self.profile}"
        )

    def _closing(self) -> str:
        rest = ", ".join(f"{name} {us:.0f}" for name, us in self.rest.items())
        exposed = ", ".join(f"{name} {left:.0f} of {us:.0f}" for name, (us, left) in self.exposed_us.items())
        return (
            f"{self.totals}\n"
            f"exposed communication as chosen: {exposed} us\n"
            f"other work: {rest} us (attention and elementwise work are rough estimates)\n"
            f"step: {self.none_us / 1000:.2f} ms without overlap, {self.chosen_us / 1000:.2f} ms as chosen, "
            f"{self.none_us / self.chosen_us:.2f}x{self._forms()}"
        )

    def _forms(self) -> str:
        if not self.forms_us:
            return ""
        times = ", ".join(f"{name} {us / 1000:.2f}" for name, us in self.forms_us.items())
        return f"\ntokens of experts: {times} ms as chosen: {'in two halves' if self.sizes.halves else 'whole'}"


def parallelism(s: PlannedBlock) -> str:
    """Return the ranks in words: "TP 8, DP 64 on 64 hosts"."""
    sizes = (("PP", s.pp), ("TP", s.tp), ("CP", s.cp), ("DP", s.dp), ("EP", s.ep))
    parts = [f"{name} {size}" for name, size in sizes if size > 1]
    return ", ".join(parts) + (f" on {s.hosts} hosts" if s.hosts > 1 else "")


LEGEND = "microseconds; matmul, comm: alone; pipelined: one chunk per rank; cN: N chunks; sN: N stripes; gain: over none"


def table(rows: Sequence[PlanRow], width: int | None = None) -> str:
    """Return `table_rows` as text. `width`: the limit of a line; columns that do not fit are left out."""
    names = strategy_names(rows)
    plain, in_pieces = (tuple(short(n) for n in names if (":" in n) is pieces) for pieces in (False, True))
    optional = ("MB", "M N K", *in_pieces, "comm", "matmul", "module", "parallelism", *reversed(plain[1:]))  # not none
    return render_table(table_rows(rows), width=width, optional=optional, floats=".0f")


def strategy_names(rows: Sequence[PlanRow]) -> list[str]:
    """Return every strategy that some site has as an alternative, none first, in the order of columns."""
    names = dict.fromkeys(s for r in rows if r.outlook for s in r.outlook.by_strategy)

    def place(name: str) -> tuple[bool, bool, bool, int]:
        s = Strategy.parse(name)
        return s.mode is not Mode.NONE, s.mode is Mode.BULK, s.striped, s.chunks

    return sorted(names, key=place)


def table_rows(rows: Sequence[PlanRow]) -> list[dict[str, Any]]:
    """Return one row per site, with a column for every strategy that some site has as an alternative."""
    names = strategy_names(rows)
    has_several = len({r.parallelism for r in rows}) > 1
    out = []
    for row in rows:
        d, o = row.site, row.outlook
        cells: dict[str, Any] = {
            "site": d.id, "module": d.module, **({"parallelism": row.parallelism} if has_several else {}),
            "kind": d.kind.value, "M N K": mnk(d), "MB": None if d.bytes is None else d.bytes / 1e6,
        }  # fmt: skip
        cells |= {"matmul": o and o.none.matmul_us, "comm": o and o.none.communication_us}
        cells |= {short(n): o.by_strategy[n].us if o and n in o.by_strategy else None for n in names}
        cells |= {"choice": str(d.strategy), "gain": o and o.gain_us}
        out.append(cells)
    return out


def short(strategy: str) -> str:
    """Return "c4" for "pipelined:chunks=4"."""
    return strategy.replace("pipelined:chunks=", "c").replace("pipelined:stripes=", "s")


def mnk(d: Decision) -> str:
    """Return the matmuls of a site: "8192x1024x8192 + 2 of 8192x128x8192"."""
    if d.work is None:
        return ""
    counts: dict[str, int] = {}
    for m, n, k, _ in d.work.matmuls:
        text = f"{m}x{n}x{k}"
        counts[text] = counts.get(text, 0) + 1
    return " + ".join(text if count == 1 else f"{count} of {text}" for text, count in counts.items())


def plan_step(
    sizes: PlannedBlock, options: Options, graphs: bool = False, progress: Callable[[str], None] = lambda _: None
) -> PlannedStep:
    """Trace the block, decide every site by `options`, and predict the step with the options' profile.

    Experts that exchange tokens are planned whole and in two halves, and the faster step is returned, as the option
    `split_tokens` allows. `graphs`: include graphs for an HTML page; needs the extension. `progress`: is called with each step
    of the work. OptionError where a saved plan does not fit.
    """
    if options.split_tokens == "off" or sizes.halves or not sizes.may_halve:
        return _plan_form(sizes, options, graphs, progress)
    in_halves = replace(sizes, halves=True)
    if options.split_tokens == "force":
        return _plan_form(in_halves, options, graphs, progress)
    whole, halves = (_plan_form(s, options, graphs, progress) for s in (sizes, in_halves))
    best = halves if halves.chosen_us < whole.chosen_us * (1 - MARGIN) else whole
    return replace(best, forms_us={"whole": whole.chosen_us, "halves": halves.chosen_us})


def _plan_form(sizes: PlannedBlock, options: Options, graphs: bool, progress: Callable[[str], None]) -> PlannedStep:
    profile = load(options.profile, sizes.tp)
    traced = trace(sizes, options, graphs, progress)
    progress("predicting the step")
    rows: list[PlanRow] = []
    rest: dict[str, float] = {}
    graph_us = []
    for graph in traced:
        own = [
            PlanRow(d, outlook(without_taken_matmuls(d, graph.plan), profile), graph.parallelisms[d.id])
            for d in graph.plan.decisions
        ]
        other = graph.rest.us(profile)
        for name, us in other.items():
            rest[name] = rest.get(name, 0.0) + us
        graph_us.append(totals([r.outlook for r in own]).chosen_us + sum(other.values()))
        rows += own
    all_graphs = tuple(g.graphs for g in traced if g.graphs)
    return PlannedStep(sizes, profile, tuple(rows), tuple(g.plan for g in traced), rest, tuple(graph_us), all_graphs)


def without_taken_matmuls(d: Decision, plan: Plan) -> Decision:
    """Return a site that is not overlapped without the matmuls that overlapped sites have taken: they are counted there."""
    if d.overlapped or d.work is None or not d.matmuls:
        return d
    taken = {m for o in plan.decisions if o.overlapped for m in o.matmuls}
    left = tuple(m for m, name in zip(d.work.matmuls, d.matmuls, strict=True) if name not in taken)
    if len(left) == len(d.matmuls):
        return d
    if left:
        return replace(d, work=replace(d.work, matmuls=left))
    return replace(d, work=replace(d.work, kind=f"bulk_{collective_of(d.kind.value)}", matmuls=(), keep=False))
