"""candidate -> the ways in which it could be run, each with what it is worth, or why there are none.

    pipelined   its match; and the match less some consumers, which are then free to hide something else
    bulk        beside sets of independent products: as few as hide it, the nearest of several that do as well

What is open to a candidate stands here; which of it is taken, so that all ways fit together, is pairing.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations

from torch.fx import Node

from ..cost.choice import StrategyChoice, margin_us
from ..cost.traffic import BULK_PRODUCTS, hidden_us
from ..graph.aten import dtype_of, shape_of
from ..graph.matmul import Matmul
from ..match import Bulk, Candidate, Gather, Miss, Site
from ..match.fusion_order import FusionOrder
from ..overrides.requested_strategy import Override
from ..plan.reasons import Reason
from ..plan.strategy import NONE, DispatchTable, Mode, Strategy
from .legality import pipelined, without
from .profitability import SiteCosts, too_small

FORCED = 1e10
"""Worth of a strategy that the user names for a site: more than all microseconds of a graph."""
OVERLAP = 1e7
"""Worth of any overlap with overlap="force"; less than what is named, more than microseconds."""
OWN = 1e6
"""With overlap="force": of its own matmuls before others'."""
ADDS_US = 0.5
"""A product that adds less than this to what a bulk site saves is not taken along."""
NEAR = 6
"""Of so many of the nearest products all sets are looked at, of the others neighbours alone."""
FEW = 4
"""Of so many consumers all sets are left out in turn, of more one or all but one."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """`saves_us`: against the plain collective and matmuls. `worth`: the same less the margin of what is not simple, over all
    that is forced. `takes`: a bit for every matmul that it takes. `whole`: pipelined with all matmuls of its own."""

    site: Site
    strategy: Strategy | DispatchTable
    saves_us: float
    worth: float
    takes: int
    choice: StrategyChoice | None = None
    whole: bool = False
    wire_dtype: str = ""

    @property
    def bulk(self) -> bool:
        return isinstance(self.site, Bulk)


@dataclass(slots=True)
class Alternatives:
    """What is open to a candidate: `ways`, the most worth first. `miss`: why there is no other way, or none at all. `choice`:
    what was weighed first, for the report."""

    ways: list[Alternative] = field(default_factory=list)
    miss: Miss | None = None
    choice: StrategyChoice | None = None
    limited: bool = True
    """Is memory counted? Not for what is forced."""
    byte_us: float = 0.0
    """What a byte at the graph's peak is worth."""


@dataclass(slots=True)
class AlternativeFinder:
    """Finds the ways of one graph's candidates. `unknown`: asks for sizes that cannot be computed (legal.unknown_size)."""

    costs: SiteCosts
    order: FusionOrder
    unknown: Callable[[Site], Miss | None]
    _bits: dict[Node, int] = field(default_factory=dict)
    _sizes: dict[object, int] = field(default_factory=dict)
    _bulk: dict[tuple[object, ...], tuple[StrategyChoice | None, float]] = field(default_factory=dict)

    def of(self, candidate: Candidate, wish: Override | None) -> Alternatives:
        """Every way of a candidate that nothing rules out; `wish`: what the user forces on it."""
        options, forced = self.costs.options, wish.strategy if wish else None
        offer = Alternatives(miss=candidate.miss, limited=not forced and options.overlap != "force")
        for mode in [forced.mode] if forced else [Mode.PIPELINED, Mode.BULK]:
            if mode is Mode.PIPELINED:
                small = self._pipelined(offer, candidate, forced, wish.chunks if wish else 0)
            else:
                small = self._beside(offer, candidate, forced)
            if small:
                return Alternatives(miss=small)
        offer.ways = _with_margin(offer.ways)
        if offer.choice is not None:
            offer.byte_us = self.costs.byte_us(candidate.collective)
        # Where two are worth the same: its own matmuls, fewer products, nearer ones.
        offer.ways.sort(key=lambda way: (-way.worth, way.bulk, len(way.site.matmuls)))
        return offer

    def _pipelined(
        self, offer: Alternatives, candidate: Candidate, forced: Strategy | DispatchTable | None, chunks: int
    ) -> Miss | None:
        """Adds the match and what is left of it without some consumers; returns why the candidate is too small for anything."""
        match = pipelined(candidate, self.order)
        sites = [*([] if isinstance(match, Miss) else [match]), *_fewer(candidate.match)]
        if isinstance(match, Miss):
            offer.miss = offer.miss or match
        elif small := too_small(match, self.costs.policy, forced):
            return small
        failed: Miss | None = None
        for site in sites:
            if unknown := self.unknown(site):
                failed = failed or unknown
                continue
            choice = None if forced else self.costs.choose(site, chunks)
            offer.choice = offer.choice or choice
            if choice is not None and choice.strategy.mode is Mode.NONE:
                failed = failed or Miss(Reason.NO_GAIN, choice.reason)
                continue
            strategy = choice.strategy if choice else forced or Strategy(Mode.PIPELINED, chunks)
            us = _saved_us(site, choice)
            whole = site is match
            wire = self.costs.wire_dtype(site)
            worth, takes = self._worth(site, us, forced), self._takes(site)
            offer.ways.append(Alternative(site, strategy, us, worth, takes, choice, whole, wire))
        if not offer.ways:
            offer.miss = offer.miss or failed
        return None

    def _beside(self, offer: Alternatives, candidate: Candidate, forced: Strategy | DispatchTable | None) -> Miss | None:
        """The same for its independent products."""
        c = candidate.collective
        if not candidate.independent_matmuls:
            return None
        if small := too_small(Bulk(c, candidate.independent_matmuls[:1]), self.costs.policy, forced):
            return small
        free: list[Matmul] = []
        failed: Miss | None = None
        for p in candidate.independent_matmuls:
            if unknown := self.unknown(Bulk(c, (p,))):
                failed = unknown
            else:
                free.append(p)
        strategy = forced or Strategy(Mode.BULK)
        # By set, as bits: the most that one of its parts, or it, was found to save.
        most: dict[int, float] = {}
        # Equal sizes are weighed once: numbers stand for them.
        here = self._number((c.op, c.ranks, shape_of(c.input), dtype_of(c.input), c.group, forced is None))
        sizes = [self._number((p.shape, p.inner, dtype_of(p.node))) for p in free]
        fed = [sum(1 << i for i, q in enumerate(free) if q.node in p.node.all_input_nodes) for p in free]
        reads = any(fed)
        taken = [self._bit(p.node) for p in free]
        for indices, bits, parts in _sets(len(free)):
            part = most[bits] = max([most.get(some, -math.inf) for some in parts], default=-math.inf)
            # One that reads another directly. (One that does so through other nodes is refused when they are fused.)
            if reads and any(fed[i] & bits for i in indices):
                continue
            products = tuple([free[i] for i in indices])
            key = (here, *[sizes[i] for i in indices])
            if key not in self._bulk:
                self._bulk[key] = self._weighed(Bulk(c, products), forced)
            choice, us = self._bulk[key]
            offer.choice = offer.choice or choice
            if choice is not None and choice.strategy.mode is Mode.NONE:
                continue
            adds = ADDS_US if choice else 0.0
            if us <= part + adds:
                continue  # fewer products do as well
            most[bits] = max(part, us)
            site, takes = Bulk(c, products), 0
            for i in indices:
                takes |= taken[i]
            offer.ways.append(Alternative(site, strategy, us, self._worth(site, us, forced), takes, choice))
        if not offer.ways:
            # The reason of the pipelined form explains more than "nothing to run beside it".
            offer.miss = offer.miss or failed or (Miss(Reason.NO_GAIN, offer.choice.reason) if offer.choice else None)
        return None

    def _number(self, sizes: object) -> int:
        return self._sizes.setdefault(sizes, len(self._sizes))

    def _weighed(self, site: Bulk, forced: Strategy | DispatchTable | None) -> tuple[StrategyChoice | None, float]:
        """What is chosen for a bulk site, and the microseconds that it saves."""
        choice = None if forced else self.costs.choose(site, 0)
        return choice, _saved_us(site, choice)

    def _worth(self, site: Site, us: float, forced: Strategy | DispatchTable | None) -> float:
        """The microseconds that a site saves; what is forced comes first."""
        if forced:
            return FORCED + us
        if self.costs.options.overlap == "force":
            return OVERLAP + (0.0 if isinstance(site, Bulk) else OWN) + us
        return us

    def _takes(self, site: Site) -> int:
        takes = 0
        for p in site.matmuls:
            takes |= self._bit(p.node)
        return takes

    def _bit(self, node: Node) -> int:
        return 1 << self._bits.setdefault(node, len(self._bits))


def _saved_us(site: Site, choice: StrategyChoice | None) -> float:
    """As predicted, or by rule of thumb where nothing was."""
    return choice.gain_us if choice else hidden_us(site)


def _with_margin(ways: list[Alternative]) -> list[Alternative]:
    """All ways but the simple one, a candidate's own matmuls and all of them, must save more than it by what predictions err:
    the margin that choose.py asks of more complicated strategies. What they are worth is less by that; those that are worth
    nothing then are gone."""
    own = next((way for way in ways if way.whole and way.choice is not None), None)
    if own is None or own.choice is None:
        return ways
    plain = own.choice.predictions[str(NONE)]
    margin = margin_us(plain.us - own.choice.gain_us, plain)
    found = [way if way.whole else replace(way, worth=way.worth - margin) for way in ways]
    return [way for way in found if way.whole or way.worth > 0]


def _fewer(match: Site | None) -> Iterator[Gather]:
    """A gather less some of its consumers, which then read the gathered tensor; of those left none reads another's product."""
    if not isinstance(match, Gather):
        return
    nodes = [k.compute.node for k in match.consumers]
    for count in range(1, len(nodes)) if len(nodes) <= FEW else (1, len(nodes) - 1):
        for gone in combinations(nodes, count):
            site = without(match, set(gone))
            made = {k.compute.node for k in site.consumers}
            if not any(k.operand.node in made for k in site.consumers):
                yield site


@cache
def _sets(count: int) -> tuple[tuple[tuple[int, ...], int, tuple[int, ...]], ...]:
    """Sets of 0 .. count - 1 (nearest first), `BULK_PRODUCTS` at most: smaller ones first, then nearer ones. Of each its
    members, these as bits, and the sets less one member, as bits."""
    found: list[tuple[int, ...]] = []
    for size in range(1, min(count, BULK_PRODUCTS) + 1):
        found += combinations(range(min(count, NEAR)), size)
        found += [tuple(range(at, at + size)) for at in range(count - size + 1) if at + size > NEAR]
    sets = [(indices, sum(1 << i for i in indices)) for indices in found]
    return tuple((indices, bits, tuple(bits & ~(1 << i) for i in indices)) for indices, bits in sets)
