"""Predict the step under context parallelism by form: what the exchange of keys and values takes, and what of it is exposed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from ub_overlap.compiler.options import Options
from ub_overlap.compiler.plan.strategy import Mode
from ub_overlap.compiler.reports.outlook import site_shape_of
from ub_overlap.compiler.text.table import render_table

from .planned_step import PlannedStep, plan_step
from .sizes import CP_FORMS, PlannedBlock

LEGEND = (
    "exchange: of all layers, alone; exposed: what it adds to the step as chosen; hidden: of the exchange without overlap; "
    "landing: memory of the slots of one graph"
)
_WIDTH, _LEFT, _LANE = 1200, 110, 20


@dataclass(frozen=True, slots=True)
class PlannedForm:
    """The predicted step in one form of context parallelism."""

    step: PlannedStep

    @property
    def form(self) -> str:
        return self.step.sizes.cp_form

    @property
    def exchange_us(self) -> float:
        """The exchange alone, without overlap."""
        return self.step.exposed_us.get("CP", (0.0, 0.0))[0]

    @property
    def exposed_us(self) -> float:
        """The time that the exchange adds to the step as chosen."""
        return self.step.exposed_us.get("CP", (0.0, 0.0))[1]

    @property
    def landing_bytes(self) -> int:
        """Landing memory of the exchange, by slot the largest of both graphs."""
        slots: dict[int, int] = {}
        for row in self.step.rows:
            if row.parallelism == "CP" and (w := row.site.window) is not None:
                slots[w.slot] = max(slots.get(w.slot, 0), w.landing_bytes)
        return sum(slots.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes that a rank sends in the exchange."""
        shapes = [site_shape_of(r.site) for r in self.step.rows if r.parallelism == "CP"]
        return sum(round(s.bytes_sent) for s in shapes if s is not None)

    @property
    def strategies(self) -> str:
        """The strategies of the exchange: "8 split, 4 none"."""
        sites = [r.site for r in self.step.rows if r.parallelism == "CP" and r.site.strategy.mode is not Mode.MERGED]
        names = [str(site.strategy).partition(":")[0] for site in sites]
        return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))

    def to_dict(self) -> dict[str, Any]:
        return {
            "form": self.form, "step_us": self.step.chosen_us, "none_us": self.step.none_us, "exchange_us": self.exchange_us,
            "exposed_us": self.exposed_us, "bytes_sent": self.bytes_sent, "landing_bytes": self.landing_bytes,
            "strategies": self.strategies,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedContext:
    """The forms that fit the block, the fastest first. `refused`: by form, why another does not fit."""

    forms: tuple[PlannedForm, ...]
    refused: dict[str, str]

    @property
    def fastest(self) -> PlannedStep:
        """The step of the fastest form."""
        return self.forms[0].step

    def saved_plan(self) -> str:
        """Return JSON for options={"overrides": path}, of the fastest form."""
        return self.fastest.saved_plan()

    def timeline(self, path: str | Path) -> Path:
        """Write the predicted steps of the sites of the fastest form, as PlannedStep."""
        return self.fastest.timeline(path)

    def to_html(self, path: str | Path) -> Path:
        """Write the page of the fastest form, with the steps of all forms above its graphs."""
        return self.fastest.to_html(path, draw_forms(self.forms))

    def to_json(self) -> str:
        """Return the prediction as JSON: that of the fastest form, and "context_parallel"."""
        context = {"forms": [f.to_dict() for f in self.forms], "refused": self.refused}
        return json.dumps({**json.loads(self.fastest.to_json()), "context_parallel": context}, indent=1)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the prediction as text. `width`: of its tables."""
        rows = [
            {
                "form": f.form,
                "step ms": f"{f.step.chosen_us / 1e3:.2f}",
                "without overlap": f"{f.step.none_us / 1e3:.2f}",
                "exchange ms": f"{f.exchange_us / 1e3:.2f}",
                "exposed ms": f"{f.exposed_us / 1e3:.2f}",
                "hidden": f"{1 - f.exposed_us / f.exchange_us:.0%}" if f.exchange_us else None,
                "MB sent": f"{f.bytes_sent / 1e6:.0f}",
                "landing MiB": f"{f.landing_bytes / 2**20:.0f}",
                "exchanges": f.strategies,
            }
            for f in self.forms
        ]
        refused = "".join(f"\nno {form}: --cp must be {why}" for form, why in self.refused.items())
        title = (
            f"context parallelism over {self.fastest.sizes.cp} ranks, causal and balanced; sites above: {self.forms[0].form}"
        )
        return f"{self.fastest.text(width)}\n\n{title}\n\n{render_table(rows, width=width)}\n{LEGEND}{refused}"


def plan_context(
    sizes: PlannedBlock,
    options: Options,
    graphs: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    forms: Sequence[str] = CP_FORMS,
) -> PlannedContext:
    """Plan the block in each of `forms` that fits. Arguments as of plan_step; at least one form must fit.

    The page has graphs of the fastest form only.
    """
    refused = {form: why for form in forms if (why := sizes.why_not_form(form))}
    planned = []
    for form in forms:
        if form not in refused:
            planned.append(PlannedForm(plan_step(replace(sizes, cp_form=form), options, False, _prefixed(progress, form))))
    planned.sort(key=lambda f: f.step.chosen_us)
    if graphs:
        planned[0] = PlannedForm(plan_step(planned[0].step.sizes, options, True, progress))
    return PlannedContext(tuple(planned), refused)


def _prefixed(progress: Callable[[str], None], form: str) -> Callable[[str], None]:
    return lambda text: progress(f"{form}: {text}")


def draw_forms(forms: Sequence[PlannedForm]) -> str:
    """Return HTML with one bar per form, all in one scale: compute, the exposed exchange, other exposed communication."""
    longest = max(f.step.chosen_us for f in forms)
    scale = (_WIDTH - _LEFT) / longest if longest else 0.0
    lanes = []
    for i, f in enumerate(forms):
        top, left = i * _LANE, float(_LEFT)
        lanes.append(f'<text x="0" y="{top + 13}">{escape(f.form)}</text>')
        totals = f.step.totals
        compute = totals.matmul_us + sum(f.step.rest.values())
        others = max(0.0, f.step.chosen_us - compute - f.exposed_us)
        parts = (
            ("compute", compute, "--matmul"), ("exposed exchange", f.exposed_us, "--collective"),
            ("other exposed communication", others, "--copy"),
        )  # fmt: skip
        for name, us, color in parts:
            width = us * scale
            title = f"<title>{name}: {us:.0f} us</title>"
            size = f'width="{max(0.0, width - 0.5):.1f}" height="{_LANE - 4}"'
            lanes.append(f'<rect x="{left:.1f}" y="{top + 1}" {size} style="fill:var({color})">{title}</rect>')
            left += width
    height = _LANE * len(forms)
    picture = f'<svg class="lanes" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="forms">{"".join(lanes)}</svg>'
    title = "forms of context parallelism: compute, exposed exchange, other exposed communication"
    return f'<details class="pipeline" open><summary>{title}</summary>{picture}</details>'
