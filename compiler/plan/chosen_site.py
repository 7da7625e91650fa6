"""The record that the rewrite obeys: one overlapped site and how it runs."""

from __future__ import annotations

from dataclasses import dataclass

from ub_overlap.runtime.site_id import SiteId

from ..match.site import Site
from .strategy import DispatchTable, Strategy


@dataclass(frozen=True, slots=True)
class ChosenSite:
    """A site of the graph with its decision. `wire_dtype`: as in `Decision`."""

    id: SiteId
    site: Site
    strategy: Strategy | DispatchTable
    wire_dtype: str = ""
