"""Saved plans: strategies by site, applied only to the graphs that they were made for.

A saved plan (a stored plan, a report's JSON, the file that `python -m ub_overlap plan --save` writes) records what each site
was. A graph that differs is an OptionError with the first site that differs. A difference of sizes alone (the last batch is
smaller) is a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ub_overlap.runtime.errors import OptionError

from ..plan.phase import PHASES
from ..plan.reasons import Kind, Reason, collective_of
from ..plan.records import PLAN_VERSION
from ..plan.strategy import STRATEGY_FORMS, Mode, Strategy, parse
from .option_file import refused
from .requested_strategy import Override
from .rule import SiteDescription

VERSIONS = tuple(range(1, PLAN_VERSION + 1))
"""Of reports and the output of `plan --save`, and of stored plans (compiler/plan/records.py)."""


@dataclass(frozen=True, slots=True)
class SavedSite:
    """One site of a saved plan. "" and 0 for facts that the plan does not have."""

    id: str
    collective: str
    """Kind without the matmul: all_gather, reduce_scatter, all_reduce, other."""
    ranks: int
    dtype: str
    module: str
    input: str
    strategy: str
    packs: tuple[int, ...] | None = None
    """As in `Decision`; None for a plan of a version without packs."""
    independent: int = 0
    """The number of its independent matmuls."""
    bucket: str = ""
    """The site that sent it together with others."""

    def override(self, by: str) -> Override:
        return Override(parse(self.strategy), by, packs=self.packs, independent=self.independent, bucket=self.bucket)


@dataclass(frozen=True, slots=True)
class SavedGraph:
    """The sites of one graph of a saved plan, in graph order, without those that were merged away."""

    phase: str
    sites: tuple[SavedSite, ...]
    origin: str
    """The file, or ""."""


def parse_saved_plan(plan: Mapping[str, Any], origin: str) -> tuple[SavedGraph, ...]:
    """Return the graphs of a saved plan. OptionError names the bad field, and the file `origin`."""

    def bad(field: str, got: Any, expected: str, fix: str = "") -> OptionError:
        return refused(origin or "a plan given as a dict", field, got, expected, fix)

    if plan.get("version") not in VERSIONS:
        raise bad(
            "version",
            plan.get("version"),
            " or ".join(map(str, VERSIONS)),
            "another version of ub_overlap wrote it: save the plan again",
        )
    if not isinstance(plan["sites"], list):
        raise bad("sites", plan["sites"], "a list of sites")
    graphs: dict[tuple[str, str], list[SavedSite]] = {}
    for i, row in enumerate(plan["sites"]):
        if not isinstance(row, Mapping):
            raise bad(f"sites[{i}]", row, "a site: a dict with id, kind, phase, strategy, ...")
        for name, kind in (("id", str), ("kind", str), ("phase", str), ("strategy", str), ("ranks", int)):
            if not isinstance(row.get(name), kind):
                raise bad(f"sites[{i}].{name}", row.get(name), f"a {'text' if kind is str else 'number'}")
        if row["kind"] not in {k.value for k in Kind}:
            raise bad(f"sites[{i}].kind", row["kind"], f"one of {', '.join(k.value for k in Kind)}")
        if row["phase"] not in PHASES:
            raise bad(f"sites[{i}].phase", row["phase"], " or ".join(map(repr, PHASES)))
        is_merged = row["strategy"] == Mode.MERGED.value
        if not is_merged and not Strategy.is_forceable(row["strategy"]):
            raise bad(f"sites[{i}].strategy", row["strategy"], f"{STRATEGY_FORMS}, or a table of these")
        packs = row.get("packs")
        if packs is not None and not (isinstance(packs, list | tuple) and all(isinstance(n, int) and n > 0 for n in packs)):
            raise bad(f"sites[{i}].packs", packs, "a list of the numbers of matmuls that become one")
        paired = row.get("paired") or ()
        if not isinstance(paired, list | tuple):
            raise bad(f"sites[{i}].paired", paired, "a list of the independent matmuls of the site")
        sites = graphs.setdefault((str(row.get("plan", plan.get("digest", ""))), row["phase"]), [])
        if not is_merged and row.get("reason") != Reason.SCALES.value:  # scales belong to another site, or to none
            shapes = row.get("shapes")
            sites.append(
                SavedSite(
                    id=row["id"],
                    collective=collective_of(row["kind"]),
                    ranks=row["ranks"],
                    dtype=str(row.get("dtype") or ""),
                    module=str(row.get("module") or ""),
                    input=str(shapes.get("input", "")) if isinstance(shapes, Mapping) else "",
                    strategy=row["strategy"],
                    packs=None if packs is None else tuple(packs),
                    independent=len(paired),
                    bucket=str(window.get("bucket") or "") if isinstance(window := row.get("window"), Mapping) else "",
                )
            )
    return tuple(SavedGraph(phase, tuple(sites), origin) for (_, phase), sites in graphs.items())


def match_saved_graph(graphs: Sequence[SavedGraph], phase: str, sites: Sequence[SiteDescription]) -> dict[str, Override]:
    """Return the overrides, by site id, of the saved graph that equals the graph of `sites` (all of its sites).

    Empty where the plan has no graph of this phase. OptionError with the first site that differs where no graph is equal.
    """
    best: tuple[int, OptionError] | None = None
    for graph in (g for g in graphs if g.phase == phase):
        difference = _first_difference(graph, sites)
        if difference is None:
            _warn_of_sizes(graph, sites)
            by = f"the saved plan {graph.origin}".strip()
            return {s.id: s.override(by) for s in graph.sites}
        if best is None or difference[0] > best[0]:
            best = difference
    if best is not None:
        raise best[1]
    return {}


def _first_difference(graph: SavedGraph, sites: Sequence[SiteDescription]) -> tuple[int, OptionError] | None:
    def error(number: int, site: str, field: str, got: Any, expected: Any) -> tuple[int, OptionError]:
        return number, OptionError(
            what=f"the saved plan does not fit this {graph.phase} graph; the first site that differs is {site}",
            where=f"{graph.origin or 'the plan'}, site {site}, field {field}",
            got=f"{field}={got!r} in the graph",
            expected=f"{field}={expected!r} in the plan",
            fix="save the plan again for this model, group and options, or use patterns: overrides={pattern: strategy}",
        )

    for number, (saved, site) in enumerate(zip(graph.sites, sites, strict=False)):
        actual = {
            "id": site.id,
            "collective": collective_of(site.kinds[0]),
            "ranks": site.ranks,
            "dtype": site.dtype,
            "module": saved.module if saved.module in site.modules else ", ".join(site.modules),
        }
        for field, got in actual.items():
            expected = getattr(saved, field)
            if expected != got and (expected or field == "ranks"):
                return error(number, site.id, field, got, expected)
    if len(graph.sites) != len(sites):
        number = min(len(graph.sites), len(sites))
        longer = graph.sites if len(graph.sites) > number else sites
        return error(number, longer[number].id, "number of sites", len(sites), len(graph.sites))
    return None


def _warn_of_sizes(graph: SavedGraph, sites: Sequence[SiteDescription]) -> None:
    for saved, site in zip(graph.sites, sites, strict=True):
        is_static = not any(c.isalpha() for c in saved.input + site.input)
        if is_static and saved.input and saved.input != site.input:
            warnings.warn(
                f"ub_overlap: {graph.origin or 'the plan'} was saved for other sizes: site {site.id} has input {site.input}, "
                f"in the plan {saved.input}; its strategies are used all the same",
                stacklevel=2,
            )
            return
