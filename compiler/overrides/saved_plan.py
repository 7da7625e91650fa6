"""options={"plan": ...}: strategies forced by site id, and what keeps a plan of another model from being obeyed.

A dict {pattern of site ids: strategy} is taken as it is. A whole saved plan (a stored plan, a report's JSON, what
`python -m ub_overlap plan --save` writes) also says what each site was: a graph that differs is an OptionError that names the
first site that does. Sizes alone may differ (a last batch is smaller): that is a warning.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError

from ..plan.plan import Plan
from ..plan.reasons import Kind, Reason, collective_of
from ..plan.strategy import Mode, Strategy, parse
from .rule import PHASES, Override, SiteDescription, refused

VERSION = 1
_EXPECTED = "a dict {site pattern: strategy}, a path of such a JSON file, or a Plan"
_STRATEGIES = "none, pipelined, bulk, pipelined:chunks=N or bulk:chunks=N, pipelined:stripes=N, or a table of these"


@dataclass(frozen=True, slots=True)
class SavedSite:
    """What a plan says of one site. "" and 0 where it says nothing."""

    id: str
    collective: str
    """Kind without the matmul: all_gather, reduce_scatter, all_reduce, other."""
    ranks: int
    dtype: str
    module: str
    input: str
    strategy: str


@dataclass(frozen=True, slots=True)
class SavedGraph:
    """The sites of one graph of a whole plan, in graph order, less those that were merged away."""

    phase: str
    sites: tuple[SavedSite, ...]
    origin: str


Pairs = tuple[tuple[str, str], ...]


def parse_plan(value: Any) -> tuple[Pairs, tuple[SavedGraph, ...]]:
    """((pattern, strategy) pairs, the graphs of a whole plan) of the forms that the option takes."""
    origin = ""
    if isinstance(value, str | Path):
        origin = str(value)
        try:
            value = json.loads(Path(value).read_text())
        except (OSError, ValueError) as e:
            raise refused("", "", origin, "a readable JSON file", "plan", fix=str(e)) from e
    if isinstance(value, Plan):
        value = json.loads(value.to_json())
    if isinstance(value, Mapping) and "sites" in value:
        graphs = _graphs(value, origin)
        pairs = {s.id: s.strategy for g in graphs for s in g.sites}
        return tuple(pairs.items()), graphs
    if isinstance(value, list | tuple) and all(isinstance(row, list | tuple) and len(row) == 2 for row in value):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise refused(origin, "", value, _EXPECTED, "plan")
    for pattern, strategy in value.items():
        if not isinstance(pattern, str) or not isinstance(strategy, str) or not Strategy.is_forceable(strategy):
            raise refused(origin, str(pattern) if origin else "", {pattern: strategy}, _STRATEGIES, "plan")
    return tuple(value.items()), ()


def without(graphs: Sequence[SavedGraph], patterns: Sequence[str]) -> tuple[SavedGraph, ...]:
    """The same plan, with sites that a pattern matches left alone."""
    return tuple(
        replace(
            g, sites=tuple(replace(s, strategy="none") if any(fnmatchcase(s.id, p) for p in patterns) else s for s in g.sites)
        )
        for g in graphs
    )


def _graphs(d: Mapping[str, Any], origin: str) -> tuple[SavedGraph, ...]:
    def bad(field: str, got: Any, expected: str, fix: str = "") -> OptionError:
        return refused(origin or "a plan given as a dict", field, got, expected, "plan", fix)

    if d.get("version") != VERSION:
        raise bad("version", d.get("version"), str(VERSION), "made by another version of ub_overlap: make it anew")
    if not isinstance(d["sites"], list):
        raise bad("sites", d["sites"], "a list of sites")
    graphs: dict[tuple[str, str], list[SavedSite]] = {}
    for i, row in enumerate(d["sites"]):
        if not isinstance(row, Mapping):
            raise bad(f"sites[{i}]", row, "a site: a dict with id, kind, phase, strategy, ...")
        for name, kind in (("id", str), ("kind", str), ("phase", str), ("strategy", str), ("ranks", int)):
            if not isinstance(row.get(name), kind):
                raise bad(f"sites[{i}].{name}", row.get(name), f"a {'text' if kind is str else 'number'}")
        if row["kind"] not in {k.value for k in Kind}:
            raise bad(f"sites[{i}].kind", row["kind"], f"one of {', '.join(k.value for k in Kind)}")
        if row["phase"] not in PHASES:
            raise bad(f"sites[{i}].phase", row["phase"], " or ".join(map(repr, PHASES)))
        merged = row["strategy"] == Mode.MERGED.value
        if not merged and not Strategy.is_forceable(row["strategy"]):
            raise bad(f"sites[{i}].strategy", row["strategy"], _STRATEGIES)
        sites = graphs.setdefault((str(row.get("plan", d.get("digest", ""))), row["phase"]), [])
        if not merged and row.get("reason") != Reason.SCALES.value:  # these belong to another site, or to none
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
                )
            )
    return tuple(SavedGraph(phase, tuple(sites), origin or "the plan") for (_, phase), sites in graphs.items())


def fit(graphs: Sequence[SavedGraph], phase: str, places: Sequence[SiteDescription]) -> dict[str, Override]:
    """What the saved graph that `places` (all sites of a graph) are a copy of forces, by site id; nothing where the plan has no
    graph of this phase. OptionError, naming the first site that differs, where none of them fits."""
    mine = [g for g in graphs if g.phase == phase]
    best: tuple[int, OptionError] | None = None
    for graph in mine:
        differs = _first_difference(graph, places)
        if differs is None:
            _warn_of_sizes(graph, places)
            return {s.id: Override(parse(s.strategy), f"the plan {graph.origin}") for s in graph.sites}
        if best is None or differs[0] > best[0]:
            best = differs
    if best is not None:
        raise best[1]
    return {}


def _first_difference(graph: SavedGraph, places: Sequence[SiteDescription]) -> tuple[int, OptionError] | None:
    def error(number: int, site: str, field: str, got: Any, expected: Any) -> tuple[int, OptionError]:
        return number, OptionError(
            what=f"the saved plan does not fit this {graph.phase} graph; the first site that differs is {site}",
            where=f"{graph.origin}, site {site}, field {field}",
            got=f"{field}={got!r} in the graph",
            expected=f"{field}={expected!r} in the plan",
            fix="make the plan anew for this model, group and options, or force sites by patterns: plan={pattern: strategy}",
        )

    for number, (saved, place) in enumerate(zip(graph.sites, places, strict=False)):
        here = {
            "id": place.id,
            "collective": collective_of(place.kinds[0]),
            "ranks": place.ranks,
            "dtype": place.dtype,
            "module": saved.module if saved.module in place.modules else ", ".join(place.modules),
        }
        for field, got in here.items():
            expected = getattr(saved, field)
            if expected != got and (expected or field == "ranks"):
                return error(number, place.id, field, got, expected)
    if len(graph.sites) != len(places):
        number = min(len(graph.sites), len(places))
        longer = graph.sites if len(graph.sites) > number else places
        return error(number, longer[number].id, "number of sites", len(places), len(graph.sites))
    return None


def _warn_of_sizes(graph: SavedGraph, places: Sequence[SiteDescription]) -> None:
    for saved, place in zip(graph.sites, places, strict=True):
        static = not any(c.isalpha() for c in saved.input + place.input)
        if static and saved.input and saved.input != place.input:
            warnings.warn(
                f"ub_overlap: {graph.origin} was made for other sizes: site {place.id} has input {place.input}, in the plan "
                f"{saved.input}; its strategies are used all the same",
                stacklevel=2,
            )
            return
