"""What to try next: the collectives whose communication is still exposed, with the option to paste.

Text, JSON and page all show this list. It reads sites as reports store them, and imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..cost.choice import MARGIN_US
from ..plan.reasons import Reason
from ..plan.strategy import Mode

SHOWN = 3
"""Rows in a text report; JSON and page have all."""
NO_TIMES = (
    "a stored plan has no schedules and no times: ub_overlap.reports(), or explain(model)(*inputs), in the program has both; "
    "to_html() and to_json() keep them"
)
REASONS_PAGE, COST_PAGE, WINDOWS_PAGE = "reference/reasons.md", "explanation/cost_model.md", "explanation/windows.md"
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class ExposedGroup:
    """Collectives of equal layers that are decided alike and still expose communication."""

    sites: tuple[str, ...]
    """"<plan digest>/<site id>", most exposed first."""
    kind: str
    phase: str
    module: str
    """Path of their module; "*" stands for the number of the layer where they differ in it."""
    strategy: str
    reason: str
    """The Reason of collectives that are left alone; "" of overlapped ones."""
    us: float
    """Exposed microseconds of all of them: measured, else predicted."""
    is_measured: bool
    advice: str
    paste: str
    """An argument of torch.compile or a command; "" where no option helps."""
    page: str
    """The page in docs/ that explains it."""

    def __str__(self) -> str:
        name = self.sites[0].partition("/")[2] + (f" and {len(self.sites) - 1} more" if len(self.sites) > 1 else "")
        how = "measured" if self.is_measured else "predicted"
        text = f"{name}: {self.kind} {self.reason or self.strategy}, {self.us:.0f} us exposed ({how}): {self.advice}"
        return text + (f": {self.paste}" if self.paste else "")


@dataclass(frozen=True, slots=True)
class WhatNext:
    """The groups, most exposed first. `sites`: collectives of the report. `unknown`: those without a time."""

    groups: tuple[ExposedGroup, ...]
    sites: int
    unknown: int
    is_plan: bool = False
    """Whether they are a stored plan's, which has neither times nor schedules."""

    @property
    def headline(self) -> str:
        """The list in one sentence; "" without collectives."""
        if not self.sites:
            return ""
        if self.is_plan:
            return NO_TIMES
        unknown = f"; {self.unknown} have no predicted time" if self.unknown else ""
        if not self.groups:
            return f"nothing is left: no collective exposes more than {MARGIN_US:g} us{unknown}"
        count = sum(len(group.sites) for group in self.groups)
        us = sum(group.us for group in self.groups)
        return f"{us:.0f} us of communication are exposed, by {count} of {self.sites} collectives{unknown}"

    def text(self) -> str:
        """Return the headline and the first groups, one a line."""
        more = [f"  and {len(self.groups) - SHOWN} more, in to_html() and to_json()"] if len(self.groups) > SHOWN else []
        return "\n".join([f"what next: {self.headline}", *(f"  {group}" for group in self.groups[:SHOWN]), *more])

    def to_dict(self) -> dict[str, Any]:
        """Return the list as plain data."""
        return {"headline": self.headline, "groups": [asdict(g) for g in self.groups]}


def find_exposed(sites: Sequence[Mapping[str, Any]]) -> WhatNext:
    """Return what is left exposed of the sites of a report. Times within the error of a prediction do not count."""
    groups: dict[tuple[str, ...], list[tuple[float, Mapping[str, Any]]]] = {}
    unknown = 0
    for site in sites:
        us = exposed_us(site)
        unknown += us is None and not _needs_no_time(site)
        if us is not None and us > MARGIN_US:
            key = (site["kind"], site["phase"], _module_glob(site["module"]), site["reason"] or "", site["strategy"])
            groups.setdefault(key, []).append((us, site))
    found = [_group(sorted(members, key=lambda member: -member[0])) for members in groups.values()]
    is_plan = not any("matmul_us" in site for site in sites)
    return WhatNext(tuple(sorted(found, key=lambda group: -group.us)), len(sites), unknown, is_plan)


def exposed_us(site: Mapping[str, Any]) -> float | None:
    """Return the time of a site beyond that of its matmuls, in microseconds; None without a time.

    It is measured where the site was, but not of a split one: its steps span all that runs between start and finish.
    """
    matmuls = site.get("matmul_us")
    if matmuls is None or site["strategy"] == Mode.MERGED.value:
        return None
    predicted = (site.get("predicted_us") or {}).get(site.get("choice"))
    took = site["measured_us"] if _is_measured(site) else predicted
    return None if took is None else max(0.0, took - matmuls)


def copied_bytes(figures: Iterable[tuple[int | None, int | None]]) -> tuple[int, int]:
    """Return the bytes that sites copied, and those of them that they copied during a matmul.

    `figures`: `bytes_copied` and `bytes_overlapped` of each site. Sites whose steps were not timed do not count.
    """
    timed = [(copied, during) for copied, during in figures if copied and during is not None]
    return sum(copied for copied, _ in timed), sum(during for _, during in timed)


def _is_measured(site: Mapping[str, Any]) -> bool:
    return site.get("measured_us") is not None and not site.get("window")


def _needs_no_time(site: Mapping[str, Any]) -> bool:
    return site["strategy"] == Mode.MERGED.value or site["reason"] in (Reason.TRIVIAL_GROUP, Reason.SCALES)


def _module_glob(module: str) -> str:
    return _LAYER_NUMBER.sub("*", module)


def _group(members: list[tuple[float, Mapping[str, Any]]]) -> ExposedGroup:
    first = members[0][1]
    modules = {site["module"] for _, site in members}
    module = first["module"] if len(modules) == 1 else _module_glob(first["module"])
    advice, paste = _advice(first, module)
    page = WINDOWS_PAGE if first.get("window") else COST_PAGE
    return ExposedGroup(
        sites=tuple(f"{site.get('plan', '')}/{site['id']}" for _, site in members),
        kind=first["kind"],
        phase=first["phase"],
        module=module,
        strategy=first["strategy"],
        reason=first["reason"] or "",
        us=round(sum(us for us, _ in members), 3),
        is_measured=all(_is_measured(site) for _, site in members),
        advice=advice,
        paste=paste,
        page=f"{REASONS_PAGE}#{first['reason']}" if first["reason"] else page,
    )


def _advice(site: Mapping[str, Any], module: str) -> tuple[str, str]:
    """Return what to do in a sentence, and what to paste for it."""
    predicted = {name: us for name, us in (site.get("predicted_us") or {}).items() if name != Mode.NONE.value}
    match site["reason"]:
        case None:
            return _advice_for_overlapped(site, module)
        case Reason.DISABLED_BY_USER:
            return "an option, an override or UB_OVERLAP_DISABLE turns it off", _options(overlap="auto")
        case Reason.BELOW_THRESHOLD if site["bytes"]:
            return "it is smaller than min_bytes", _options(min_bytes=site["bytes"])
        case Reason.NO_TRANSPORT:
            return "doctor says what this machine lacks", "python -m ub_overlap doctor"
        case Reason.MEMORY:
            return "allow more memory for collectives in flight", _options(split_bytes=1 << 30)
        case Reason.REDUCE_DTYPE:
            return "send gradients in the traced type", _options(reduce_dtype=None)
        case Reason.STRATEGY_ILLEGAL:
            return f"request one of {', '.join(site['options']) or 'none'}, or auto", _override(site, module, "auto")
        case Reason.NO_GAIN if predicted:
            best = min(predicted, key=lambda name: predicted[name])
            return "the predicted gain is within the error: measure the best strategy", _override(site, module, best)
    if Mode.SPLIT.value in site["options"]:
        return "start it early and finish it late, and measure", _override(site, module, Mode.SPLIT.value)
    return "no option overlaps it; the reason says what the model would have to change", ""


def _advice_for_overlapped(site: Mapping[str, Any], module: str) -> tuple[str, str]:
    predicted, choice, best = site["predicted_us"], site["choice"], site.get("best")
    if best in predicted and predicted[best] < predicted[choice]:
        return f"{best} is predicted to be faster", _override(site, module, "auto")
    if site.get("window"):
        return "its window has too little compute: move work that does not need it in between", ""
    return "the fastest strategy that is predicted: measure the next ones", _options(autotune=True)


def _override(site: Mapping[str, Any], module: str, strategy: str) -> str:
    rule = {"module": module, "kind": site["kind"], "phase": site["phase"], "strategy": strategy}
    if rule["phase"] == "step":
        del rule["phase"]
    return _options(overrides=[{field: value for field, value in rule.items() if value}])


def _options(**options: Any) -> str:
    return f"options={options!r}"
