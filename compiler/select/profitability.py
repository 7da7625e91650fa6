"""Predicted gain and strategy of a site: the threshold of the options, then the cost model with the device's profile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.fx import Graph

from ..cost.assumed_sizes import assume_sizes
from ..cost.choice import StrategyChoice, choose
from ..cost.curve import at
from ..cost.fused_choice import choose_fused
from ..cost.policy import Policy
from ..cost.predict import Prediction, predict
from ..cost.profile import Profile
from ..cost.site_shape import SiteShape
from ..cost.site_sizes import NO_HINTS, Hints, Ranges, hints_of, ranges_of, shape_at, shape_of_site, sizes_of_site
from ..cost.wire import FLOAT8
from ..graph.graph_inputs import NO_NEIGHBORS, Neighbors
from ..match import Bulk, Fused, Miss, Site
from ..match.collectives import Collective
from ..plan.reasons import Reason
from ..plan.strategy import NONE, DispatchTable, Strategy
from .dispatch_table import DispatchSettings, choose_for_all_sizes, rows_at, rows_of
from .legality import can_send_float8

LARGE_TRANSFER = 64 << 20
"""Bytes of a transfer that reaches full bandwidth."""


class SiteTimes(NamedTuple):
    """The prediction of a site without overlap, and the microseconds that it takes as chosen."""

    plain: Prediction
    us: float


@dataclass(slots=True)
class SiteCosts:
    """Predictions for the sites of one graph, and the profiles that they used."""

    policy: Policy
    hints: Hints
    ranges: Ranges
    neighbors: Neighbors = field(default_factory=dict)
    """Packed weights, and cached casts of siblings."""
    profiles: dict[str, Profile] = field(default_factory=dict)
    """By digest."""
    choices: dict[tuple[Any, ...], StrategyChoice] = field(default_factory=dict)
    """By the facts that make two sites equal."""

    @classmethod
    def of(cls, graph: Graph, policy: Policy, neighbors: Neighbors = NO_NEIGHBORS) -> SiteCosts:
        return cls(policy, assume_sizes(graph, hints_of(graph)), ranges_of(graph), neighbors)

    def wire_dtype(self, site: Site) -> str:
        """Return "float8" for a reduction that sends its products as float8, else ""."""
        return FLOAT8 if self.policy.wants_float8_wire and can_send_float8(site) else ""

    def choose(self, site: Site, chunks: int) -> StrategyChoice | None:
        """Return the predicted best strategy for all sizes that the site may have (dispatch_table.py).

        None where the standard form is forced, or a size has no value. overlap="force" asks for overlap, not for speed:
        without a GPU and without a profile of the user's it uses one piece per rank for every shape.
        """
        forced = self.policy.is_forced
        device = site.collective.node.meta["val"].device.type
        is_unmodeled = not self.policy.is_modeled(device) and not self.policy.is_autotuned
        if forced and (chunks or isinstance(site, Bulk) or is_unmodeled):
            return None
        sizes = sizes_of_site(site, self.wire_dtype(site))
        shape = shape_at(sizes, self.hints) if sizes is not None else None
        if sizes is None or shape is None:
            return None
        profile = self.policy.profile(shape.ranks, device)
        self.profiles[profile.digest] = profile
        rows = rows_of(site)
        key = (sizes, rows, device, chunks)
        if key not in self.choices:

            def choose_at(shape: SiteShape) -> StrategyChoice:
                return choose(shape, profile, forced, chunks)

            settings = DispatchSettings(self.policy.threshold, self.policy.is_autotuned)
            traced = choose_at(shape)
            self.choices[key] = choose_for_all_sizes(traced, choose_at, sizes, rows, self.hints, self.ranges, settings)
        return self.choices[key]

    def choose_fused(self, site: Fused) -> StrategyChoice | None:
        """Return the predicted best strategy of a fused site for all sizes that it may have; "none" where that is plain.

        None where its size was not measured, or has no value.
        """
        sizes = sizes_of_site(site)
        shape = shape_at(sizes, self.hints) if sizes is not None else None
        if sizes is None or shape is None or shape.hosts > 1:
            return None
        profile = self.policy.profile(shape.ranks, site.collective.node.meta["val"].device.type)
        traced = choose_fused(shape, profile)
        if traced is None:
            return None
        self.profiles[profile.digest] = profile
        if traced.strategy == NONE:
            return traced

        def choose_at(other: SiteShape) -> StrategyChoice:
            return choose_fused(other, profile, in_op=True) or replace(traced, strategy=NONE)

        settings = DispatchSettings(0, self.policy.is_autotuned, least_rows=1)
        return choose_for_all_sizes(traced, choose_at, sizes, rows_of(site), self.hints, self.ranges, settings)

    def times_us(self, site: Site, choice: StrategyChoice | None, requested: Strategy | DispatchTable) -> SiteTimes | None:
        """Return the predicted times of a site with its choice (None: with the strategy `requested`) at the traced sizes.

        None where nothing is predicted.
        """
        if choice is not None:
            plain = choice.predictions[str(NONE)]
            return SiteTimes(plain, plain.us - choice.gain_us)
        device = site.collective.node.meta["val"].device.type
        shape = shape_of_site(site, self.hints, wire_dtype=self.wire_dtype(site))
        if shape is None or not self.policy.is_modeled(device) or requested.is_fused:
            return None
        profile = self.policy.profile(shape.ranks, device)
        strategy = requested.at(rows_at(site, self.hints) or 0)
        return SiteTimes(predict(shape, NONE, profile), predict(shape, strategy, profile).us)

    def us_per_byte(self, c: Collective) -> float:
        """Return the price of a byte at the graph's peak memory: the time to send one.

        A user who needs memory can keep shards and gather them again (memory_budget=0), which costs at most that.
        """
        device = c.node.meta["val"].device.type
        return at(self.policy.profile(c.ranks, device).push, LARGE_TRANSFER) / LARGE_TRANSFER

    def profile_names(self) -> str:
        """Return the names of the profiles that were used, the same on all ranks."""
        return ", ".join(sorted(str(p) for p in self.profiles.values()))


def too_small(site: Site, policy: Policy, forced: Strategy | DispatchTable | None, hints: Hints = NO_HINTS) -> Miss | None:
    """Return the miss of a site below the threshold; None above it, and where its strategy is forced.

    `hints`: for the bytes of a dynamic size. Without them it is not below the threshold.
    """
    sent = policy.bytes_sent(site, hints=hints)
    if forced is not None or not policy.is_below_threshold(sent):
        return None
    return Miss(Reason.BELOW_THRESHOLD, f"a rank sends {sent} bytes; overlap='auto' starts at min_bytes={policy.threshold}")
