"""What a Decision shows of a site: shapes, types, group, module path, source line."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch.fx import Node

from ..cost.site_sizes import Hints, shape_of_site
from ..graph.aten import dtype_of, shape_of, tensor_of
from ..graph.sizes import format_shape
from ..graph.source_location import module_path, source_line
from ..match import Bulk, Candidate, Gather, Reduction
from ..overrides.rule import SiteDescription
from ..plan.decision import SiteSizes


def groups_of(candidates: list[Candidate]) -> dict[str, str]:
    """Names that are the same on all ranks for the groups of a graph: g0, g1, ... by first use."""
    out: dict[str, str] = {}
    for c in candidates:
        if c.collective.group is not None:
            out.setdefault(c.collective.group, f"g{len(out)}")
    return out


def row(candidate: Candidate, site: Gather | Reduction | Bulk | None, groups: dict[str, str]) -> dict[str, Any]:
    """The descriptive fields of a Decision."""
    c = candidate.collective
    shapes: list[tuple[str, str]] = []
    if tensor_of(c.input) is not None:
        shapes.append(("input", format_shape(shape_of(c.input))))
    if isinstance(site, Gather):
        shapes.append(("gathered", format_shape((site.rows, site.cols))))
        shapes += [(f"matmul{i}", _product(k.compute)) for i, k in enumerate(site.consumers)]
    elif isinstance(site, Reduction):
        shapes.append(("product", format_shape((site.rows, site.cols))))
        shapes += [(f"matmul{i}", _product(t)) for i, t in enumerate(site.terms)]
    elif isinstance(site, Bulk):
        shapes += [(f"matmul{i}", _product(p)) for i, p in enumerate(site.matmuls)]
    nodes = _makers(candidate, site)
    return {
        "group": groups.get(c.group or "", ""),
        "ranks": c.ranks,
        "shapes": tuple(shapes),
        "dtype": str(dtype_of(c.input)).removeprefix("torch.") if tensor_of(c.input) is not None else "",
        "module": next((m for n in nodes if (m := module_path(n))), ""),
        "source": next((s for n in nodes if (s := source_line(n))), ""),
    }


def work_of(
    candidate: Candidate, site: Gather | Reduction | Bulk | None, hints: Hints, wire_dtype: str = ""
) -> SiteSizes | None:
    """The sizes of `site`, or of the collective alone; None where the cost model knows nothing of it."""
    c = candidate.collective
    if c.op is None or c.ranks < 2 or tensor_of(c.input) is None:
        return None
    shape = shape_of_site(site or Bulk(c, ()), hints, exact=True, wire_dtype=wire_dtype)
    return SiteSizes(**asdict(shape)) if shape is not None else None


def _makers(candidate: Candidate, site: Gather | Reduction | Bulk | None) -> list[Node]:
    """The nodes whose modules and lines a site is shown with: the matmuls that its tensor meets, then the collective."""
    if isinstance(site, Gather):
        return [*(k.compute.node for k in site.consumers), candidate.collective.node]
    if isinstance(site, Reduction):
        return [*(t.node for t in site.terms), candidate.collective.node]
    return [candidate.collective.node]


def place_of(candidate: Candidate, id: str, phase: str, kinds: tuple[str, ...]) -> SiteDescription:
    """What rules and saved plans see of a candidate, whatever is decided on it."""
    c = candidate.collective
    modules = dict.fromkeys(m for n in _makers(candidate, candidate.match) if (m := module_path(n)))
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


def _product(p: Any) -> str:
    return f"{format_shape(p.lhs.shape if not p.lhs.is_transposed else p.lhs.shape[::-1])} @ {format_shape((p.rhs.rows, p.rhs.cols))}"
