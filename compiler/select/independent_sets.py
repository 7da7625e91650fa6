"""The sets of independent matmuls that hide a collective best: each saves more than every smaller set of its matmuls.

The layers of a model have the same sizes, so the sets of one layer are those of all: found once, and kept by sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations

from ..cost.choice import StrategyChoice
from ..cost.site_sizes import sizes_of_site
from ..cost.traffic import BULK_PRODUCTS, hidden_us
from ..graph.aten import dtype_of, shape_of
from ..graph.matmul import Matmul
from ..match import Bulk, Site
from ..match.collectives import Collective
from ..match.site import Match
from ..overrides.requested_strategy import Override
from ..plan.strategy import DispatchTable, Mode, Strategy
from .dispatch_table import rows_of
from .pack_choice import PackedChoice, choose_form
from .profitability import SiteCosts

ADDS_US = 0.5
"""An independent matmul joins a site only if it adds at least this to the saved time."""
NEAR = 6
"""All sets of this many nearest matmuls are considered; of farther ones only runs of neighbors."""
MOST_PIPELINED = 3
"""Independent matmuls of one pipelined site at most: it has matmuls of its own, and hides the most with few more."""

Indices = tuple[int, ...]
"""A set of the given matmuls, by their places."""
BulkSet = tuple[Indices, StrategyChoice | None, float]
"""With its choice (None where a strategy is requested), and the microseconds that it saves."""
PipelinedSet = tuple[Indices, PackedChoice, float]


@dataclass(slots=True)
class SetFinder:
    """Finds the sets of one graph's collectives."""

    costs: SiteCosts
    _size_numbers: dict[object, int] = field(default_factory=dict)
    _bulk_choices: dict[object, tuple[StrategyChoice | None, float]] = field(default_factory=dict)
    _bulk_sets: dict[object, tuple[StrategyChoice | None, list[BulkSet]]] = field(default_factory=dict)
    _forms: dict[object, PackedChoice] = field(default_factory=dict)
    _pipelined_sets: dict[object, list[PipelinedSet]] = field(default_factory=dict)

    def bulk(
        self, c: Collective, matmuls: Sequence[Matmul], forced: Strategy | DispatchTable | None
    ) -> tuple[StrategyChoice | None, list[BulkSet]]:
        """Return the first choice, and the sets of `matmuls` that hide `c` in bulk."""
        device = c.node.meta["val"].device.type
        collective = self._number_of(
            (c.op, c.ranks, shape_of(c.input), c.narrow_dtype, dtype_of(c.node), c.group, device, forced is None)
        )
        numbers, inputs = self._numbers_of(matmuls), _inputs_of(matmuls)
        if (known := self._bulk_sets.get((collective, numbers, inputs))) is not None:
            return known
        first: StrategyChoice | None = None
        found: list[BulkSet] = []
        best_us: dict[int, float] = {}  # by set, as bits: the most that it or a subset saves
        most_us = {0: math.inf}  # by set, as bits: the most that any set with these matmuls saves
        any_reads = any(inputs)
        for indices, bits, subsets in _sets(len(matmuls), BULK_PRODUCTS):
            subset_us = best_us[bits] = max([best_us.get(subset, -math.inf) for subset in subsets], default=-math.inf)
            most_us[bits] = min([most_us[subset] for subset in subsets if subset in most_us], default=math.inf)
            if not forced and most_us[bits] <= subset_us + ADDS_US:
                continue  # fewer matmuls hide all
            # A matmul that reads another directly. (One that does so through other nodes is refused when the site is fused.)
            if any_reads and any(inputs[i] & bits for i in indices):
                continue
            key = (collective, *[numbers[i] for i in indices])
            if key not in self._bulk_choices:
                site = Bulk(c, tuple([matmuls[i] for i in indices]))
                choice = None if forced else self.costs.choose(site, 0)
                self._bulk_choices[key] = choice, saved_us_of(site, choice)
            choice, saved_us = self._bulk_choices[key]
            most_us[bits] = min(most_us[bits], choice.most_us if choice else math.inf)
            first = first or choice
            if choice is not None and choice.strategy.mode is Mode.NONE:
                continue
            if saved_us <= subset_us + (ADDS_US if choice else 0.0):
                continue  # fewer matmuls do as well
            best_us[bits] = max(subset_us, saved_us)
            found.append((indices, choice, saved_us))
        self._bulk_sets[collective, numbers, inputs] = first, found
        return first, found

    def pipelined(
        self,
        match: Match,
        forms: Sequence[Match],
        alone: PackedChoice,
        override: Override | None,
        matmuls: Sequence[Matmul],
    ) -> list[PipelinedSet]:
        """Return the sets of `matmuls` that a pipelined site may have next to its own. The sites of the choices are those of
        the first call with these sizes.

        `forms`: the match with packed operands. `alone`: its choice without any. With a requested strategy: sets of as many as
        are requested.
        """
        sizes = tuple([sizes_of_site(form, self.costs.wire_dtype(form)) for form in (match, *forms)])
        node = match.collective.node
        site = (sizes, rows_of(match), node.meta["val"].device.type, override) if None not in sizes else node
        numbers, inputs = self._numbers_of(matmuls), _inputs_of(matmuls)
        alone_us = alone.choice.gain_us if alone.choice else 0.0
        of_all = (site, numbers, inputs, alone_us, alone.most_us)
        if (known := self._pipelined_sets.get(of_all)) is not None:
            return known
        requested = override.independent if override and override.strategy else None
        found: list[PipelinedSet] = []
        best_us = {0: alone_us}  # by set, as bits: the most that it or a subset saves
        most_us = {0: alone.most_us}  # by set, as bits: the most that any set with these matmuls saves
        for indices, bits, subsets in _sets(len(matmuls), requested or MOST_PIPELINED):
            subset_us = best_us[bits] = max([best_us[subset] for subset in subsets])
            most_us[bits] = min([most_us[subset] for subset in subsets])
            if requested is None and most_us[bits] <= subset_us + ADDS_US:
                continue  # fewer matmuls hide all
            if requested not in (None, len(indices)) or any(inputs[i] & bits for i in indices):
                continue
            key = (site, *[numbers[i] for i in indices])
            if key not in self._forms:
                chosen = tuple([matmuls[i] for i in indices])
                with_forms = [replace(form, independent=chosen) for form in forms]
                self._forms[key] = choose_form(replace(match, independent=chosen), self.costs, override, with_forms)
            form = self._forms[key]
            most_us[bits] = min(most_us[bits], form.most_us)
            saved_us = saved_us_of(form.site, form.choice)
            if form.choice is not None and form.choice.strategy.mode is Mode.NONE:
                continue
            if requested is None:
                if saved_us <= subset_us + ADDS_US:
                    continue  # fewer matmuls do as well
                best_us[bits] = saved_us
            found.append((indices, form, saved_us))
        self._pipelined_sets[of_all] = found
        return found

    def _numbers_of(self, matmuls: Sequence[Matmul]) -> Indices:
        """Return a number for each matmul: equal for equal sizes."""
        return tuple([self._number_of((p.shape, p.inner, dtype_of(p.node))) for p in matmuls])

    def _number_of(self, sizes: object) -> int:
        return self._size_numbers.setdefault(sizes, len(self._size_numbers))


def fitting_independent(site: Site, independent: Sequence[Matmul]) -> list[Matmul]:
    """Return the nearest of `independent` that the op of `site` may compute as well.

    They have the type of its own matmuls. They read no value inside the site, such as a sum that is also kept, and none of
    its nodes reads them. (Dependencies through other nodes are found when the site is fused.)
    """
    members = set(site.members)
    inputs = {i for n in members for i in n.all_input_nodes}
    dtype = dtype_of(site.matmuls[0].node)
    fitting = [
        p
        for p in independent
        if dtype_of(p.node) == dtype and p.node not in inputs and members.isdisjoint(p.node.all_input_nodes)
    ]
    return fitting[:NEAR]


def saved_us_of(site: Site, choice: StrategyChoice | None) -> float:
    """Return the predicted saving, or an estimate where nothing was predicted."""
    return choice.gain_us if choice else hidden_us(site)


def _inputs_of(matmuls: Sequence[Matmul]) -> Indices:
    """Return for each matmul those of `matmuls` that it reads directly, as bits."""
    bits = {p.node: 1 << i for i, p in enumerate(matmuls)}
    return tuple([sum(bits.get(n, 0) for n in p.node.all_input_nodes) for p in matmuls])


@cache
def _sets(count: int, most: int) -> tuple[tuple[Indices, int, Indices], ...]:
    """Return the sets of 0 .. count - 1 (nearest first) to consider, `most` members at most.

    Smaller sets come first, then nearer ones. Each is (members, members as bits, the sets without one member as bits).
    """
    found: list[Indices] = []
    for size in range(1, min(count, most) + 1):
        found += combinations(range(min(count, NEAR)), size)
        found += [tuple(range(at, at + size)) for at in range(count - size + 1) if at + size > NEAR]
    sets = [(indices, sum(1 << i for i in indices)) for indices in found]
    return tuple((indices, bits, tuple(bits & ~(1 << i) for i in indices)) for indices, bits in sets)
