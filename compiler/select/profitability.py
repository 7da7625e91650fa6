"""Is a site worth it, and how is it run: the options' floor, then the cost model with the device's profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph

from ..cost.choice import StrategyChoice, choose
from ..cost.curve import at
from ..cost.policy import Policy
from ..cost.profile import Profile
from ..cost.site_shape import SiteShape
from ..cost.site_sizes import Hints, Ranges, hints_of, ranges_of, shape_at, sizes_of_site
from ..cost.wire import FLOAT8
from ..match import Bulk, Miss, Site
from ..match.collectives import Collective
from ..options import Options
from ..plan.reasons import Reason
from ..plan.strategy import DispatchTable, Strategy
from .dispatch_table import DispatchSettings, carried, rows_of
from .legality import can_send_float8

MUCH = 64 << 20
"""Bytes of a transfer that is as fast as it gets."""


@dataclass(slots=True)
class SiteCosts:
    """What decisions of one graph share: the options, values and ranges of symbols, and the profiles that were used."""

    options: Options
    policy: Policy
    hints: Hints
    ranges: Ranges
    used: dict[str, Profile] = field(default_factory=dict)
    known: dict[tuple[Any, ...], StrategyChoice] = field(default_factory=dict)
    """By what makes sites equal."""

    @classmethod
    def of(cls, graph: Graph, options: Options, policy: Policy) -> SiteCosts:
        return cls(options, policy, hints_of(graph), ranges_of(graph))

    def wire_dtype(self, site: Site) -> str:
        """Return "float8" for a reduction whose products are sent as float8, else ""."""
        return FLOAT8 if self.policy.wants_float8_wire and can_send_float8(site) else ""

    def choose(self, site: Site, chunks: int) -> StrategyChoice | None:
        """The predicted best of what the options leave open, for all sizes that the site may have (carry.py); None where it is
        forced to the standard form, or its sizes have no values.

        overlap="force" asks for overlap and not for speed: without a GPU and without a profile of the user's it keeps one
        piece a rank, whatever the shape.
        """
        forced = self.policy.is_forced
        device = site.collective.node.meta["val"].device.type
        blind = not self.policy.is_modeled(device) and not self.policy.is_autotuned
        if forced and (chunks or isinstance(site, Bulk) or blind):
            return None
        sizes = sizes_of_site(site, self.wire_dtype(site))
        shape = shape_at(sizes, self.hints) if sizes is not None else None
        if sizes is None or shape is None:
            return None
        profile = self.policy.profile(shape.ranks, device)
        self.used[profile.digest] = profile
        rows = rows_of(site)
        if (same := self.known.get((sizes, rows, device, chunks))) is not None:
            return same

        def weigh(shape: SiteShape) -> StrategyChoice:
            return choose(shape, profile, forced, chunks)

        asked = DispatchSettings(self.policy.threshold, self.policy.is_autotuned)
        found = carried(weigh(shape), weigh, sizes, rows, self.hints, self.ranges, asked)
        self.known[sizes, rows, device, chunks] = found
        return found

    def byte_us(self, c: Collective) -> float:
        """What a byte at the peak of a graph is worth: what it takes to send one. Whoever wants memory may keep shards and
        gather them again (memory_budget=0), which costs at most that."""
        device = c.node.meta["val"].device.type
        return at(self.policy.profile(c.ranks, device).push, MUCH) / MUCH

    def profile(self) -> str:
        """The names of the profiles that were used, the same on all ranks."""
        return ", ".join(sorted(str(p) for p in self.used.values()))


def too_small(site: Site, policy: Policy, forced: Strategy | DispatchTable | None) -> Miss | None:
    """Return the miss of a site below the threshold; None above it, and where its strategy is forced."""
    sent = policy.bytes_sent(site)
    if forced is not None or not policy.is_below_threshold(sent):
        return None
    return Miss(Reason.BELOW_THRESHOLD, f"a rank sends {sent} bytes; overlap='auto' starts at min_bytes={policy.threshold}")
