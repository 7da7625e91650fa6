"""The facts about a site that a Decision shows: shapes, types, group, module path, source line."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch.fx import Node

from ..cost.site_sizes import Hints, shape_of_site
from ..graph.aten import dtype_of, shape_of, tensor_of
from ..graph.sizes import format_shape
from ..graph.source_location import module_path, module_paths, source_line
from ..match import Bulk, Candidate, Gather, Reduction, Site
from ..overrides.rule import SiteDescription
from ..plan.decision import SiteSizes


def group_names(candidates: list[Candidate]) -> dict[str, str]:
    """Return a name for each group of a graph that is the same on all ranks: g0, g1, ... by first use."""
    names: dict[str, str] = {}
    for c in candidates:
        if c.collective.group is not None:
            names.setdefault(c.collective.group, f"g{len(names)}")
    return names


def describe_site(candidate: Candidate, site: Site | None, groups: dict[str, str]) -> dict[str, Any]:
    """Return the descriptive fields of a Decision."""
    c = candidate.collective
    shapes: list[tuple[str, str]] = []
    if tensor_of(c.input) is not None:
        shapes.append(("input", format_shape(shape_of(c.input))))
    if isinstance(site, Gather):
        shapes.append(("gathered", format_shape((site.rows, site.cols))))
        shapes += [(f"matmul{i}", _matmul_shape(k.compute)) for i, k in enumerate(site.consumers)]
    elif isinstance(site, Reduction):
        shapes.append(("product", format_shape((site.rows, site.cols))))
        shapes += [(f"matmul{i}", _matmul_shape(t)) for i, t in enumerate(site.terms)]
    if site is not None:
        own = len(site.matmuls) - len(site.independent)
        shapes += [(f"matmul{i}", _matmul_shape(p)) for i, p in enumerate(site.independent, own)]
    nodes = _shown_nodes(candidate, site)
    return {
        "group": groups.get(c.group or "", ""),
        "ranks": c.ranks,
        "shapes": tuple(shapes),
        "dtype": str(dtype_of(c.input)).removeprefix("torch.") if tensor_of(c.input) is not None else "",
        "module": next((m for n in nodes if (m := module_path(n))), ""),
        "source": next((s for n in nodes if (s := source_line(n))), ""),
    }


def reported_sizes(candidate: Candidate, site: Site | None, hints: Hints, wire_dtype: str = "") -> SiteSizes | None:
    """Return the sizes of `site`, or of the collective alone; None if the cost model does not cover it."""
    c = candidate.collective
    if c.op is None or c.ranks < 2 or tensor_of(c.input) is None:
        return None
    shape = shape_of_site(site or Bulk(c, ()), hints, exact=True, wire_dtype=wire_dtype)
    return SiteSizes(**asdict(shape)) if shape is not None else None


def _shown_nodes(candidate: Candidate, site: Site | None) -> list[Node]:
    """The nodes whose modules and lines are shown: the matmuls of the collective's data, then the collective."""
    if isinstance(site, Gather):
        return [*(k.compute.node for k in site.consumers), candidate.collective.node]
    if isinstance(site, Reduction):
        return [*(t.node for t in site.terms), candidate.collective.node]
    return [candidate.collective.node]


def describe_candidate(candidate: Candidate, id: str, phase: str, kinds: tuple[str, ...]) -> SiteDescription:
    """Return the facts that rules and saved plans match, which do not depend on the decision."""
    c = candidate.collective
    modules = dict.fromkeys(m for n in _shown_nodes(candidate, candidate.match) for m in module_paths(n))
    known = tensor_of(c.input)
    return SiteDescription(
        id=id,
        phase=phase,
        kinds=kinds,
        modules=tuple(modules),
        ranks=c.ranks,
        dtype=str(dtype_of(c.input)).removeprefix("torch.") if known is not None else "",
        input=format_shape(shape_of(c.input)) if known is not None else "",
    )


def _matmul_shape(p: Any) -> str:
    return f"{format_shape((p.lhs.rows, p.lhs.cols))} @ {format_shape((p.rhs.rows, p.rhs.cols))}"
