"""candidate -> its alternatives, each with its benefit, or the reason why there are none.

    pipelined   the match; the match without some consumers, which other sites may then use; and the match with few
                independent matmuls, which hide what its own leave exposed
    bulk        with sets of independent matmuls: as few as hide the collective, the nearest of several equal ones
    fused       of few tokens, as one kernel with bias, norms and residual behind it

This file lists the alternatives of each candidate. assignment.py selects the alternatives that fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from torch.fx import Node

from ..cost.choice import StrategyChoice, margin_us
from ..graph.matmul import Matmul
from ..match import Bulk, Candidate, Fused, Gather, Miss, Site, fused_forms
from ..match.fusion_order import FusionOrder
from ..match.pack_groups import packed_forms
from ..match.site import Match
from ..overrides.requested_strategy import Override
from ..plan.reasons import Reason
from ..plan.strategy import NONE, DispatchTable, Mode, Strategy
from .benefit import NO_BENEFIT, Benefit
from .fused_form import choose_fused_form
from .independent_sets import SetFinder, fitting_independent, saved_us_of
from .legality import pipelined, without
from .pack_choice import PackedChoice, choose_form
from .profitability import SiteCosts, too_small

FEW = 4
"""Of up to this many consumers every subset may be left out; of more, one or all but one."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to run a candidate."""

    site: Site
    strategy: Strategy | DispatchTable
    saved_us: float
    """Predicted, against the plain collective and matmuls."""
    benefit: Benefit
    """The priorities, then `saved_us` minus the margin (none for the simplest alternative)."""
    matmul_bits: int
    """One bit for each matmul of the site."""
    choice: StrategyChoice | None = None
    has_all_consumers: bool = False
    """Pipelined with all matmuls of the match."""
    wire_dtype: str = ""
    """As in `Decision`."""
    pack_reason: str = ""
    """Why its matmuls are packed or apart; "" where nothing could be packed."""

    @property
    def is_bulk(self) -> bool:
        return isinstance(self.site, Bulk)

    @property
    def moves_matmuls(self) -> bool:
        """Whether independent matmuls run earlier or later than in the graph, so that tensors may live longer."""
        return bool(self.site.independent)


@dataclass(slots=True)
class Alternatives:
    """The alternatives of one candidate."""

    ranked: list[Alternative] = field(default_factory=list)
    """The largest benefit first."""
    miss: Miss | None = None
    """Why a form is missing, or why there are no alternatives."""
    choice: StrategyChoice | None = None
    """The first choice of the cost model, for the report."""
    counts_memory: bool = True
    """Whether peak memory limits the candidate; False where its strategy is requested."""
    us_per_byte: float = 0.0
    """Price of a byte at the graph's peak memory; 0 where predicted times do not decide."""
    is_refused: bool = False
    """Whether nothing but the plain collective is legal, or wanted by the user."""
    independent_limit: str = ""
    """The option that keeps independent matmuls out of the candidate, for the report."""


@dataclass(slots=True)
class AlternativeFinder:
    """Finds the alternatives of one graph's candidates. `find_unknown_size`: the miss of a site with a size that cannot be
    computed (legality.unknown_size)."""

    costs: SiteCosts
    order: FusionOrder
    find_unknown_size: Callable[[Site], Miss | None]
    _bits: dict[Node, int] = field(default_factory=dict)
    _sets: SetFinder = field(init=False)

    def __post_init__(self) -> None:
        self._sets = SetFinder(self.costs)

    def find(self, candidate: Candidate, override: Override | None) -> Alternatives:
        """Return every legal alternative of a candidate. `override`: the user's request for it."""
        forced = override.strategy if override else None
        alternatives = Alternatives(miss=candidate.miss, counts_memory=not forced)
        if forced and forced.is_fused:
            return self._fused(alternatives, candidate, forced)
        for mode in [forced.mode] if forced else [Mode.PIPELINED, Mode.BULK]:
            if mode is Mode.BULK:
                small = self._add_bulk(alternatives, candidate, forced)
            else:
                small = self._add_pipelined(alternatives, candidate, override)
            if small:
                alternatives = Alternatives(miss=small)
                break
        if not forced:
            self._add_fused(alternatives, candidate)
        allowed = self.costs.policy.independent_matmuls
        if allowed != "auto" and candidate.independent_matmuls and not forced:
            alternatives.independent_limit = f"independent_matmuls={allowed!r}"
        alternatives.ranked = _subtract_margin(alternatives.ranked)
        if alternatives.choice is not None and not self.costs.policy.is_forced:
            alternatives.us_per_byte = self.costs.us_per_byte(candidate.collective)
        # Of equal benefits: its own matmuls first, then fewer matmuls, then nearer ones.
        alternatives.ranked.sort(key=lambda a: (a.benefit.negated, a.is_bulk, len(a.site.matmuls)))
        return alternatives

    def _fused(self, alternatives: Alternatives, candidate: Candidate, forced: Strategy | DispatchTable) -> Alternatives:
        """Return the fused forms, of which a user requests one. The first has the most behind the collective."""
        forms = self._fused_forms(candidate)
        assert isinstance(candidate.fused, Fused)  # find_illegal
        if not forms:
            return Alternatives(miss=self.find_unknown_size(candidate.fused))
        alternatives.ranked = [Alternative(form, forced, 0.0, self._benefit(form, 0.0, forced), 0) for form in forms]
        return alternatives

    def _fused_forms(self, candidate: Candidate) -> list[Fused]:
        """Return the fused forms whose sizes are known, the largest first: another site may have a part of it."""
        if not isinstance(candidate.fused, Fused):
            return []
        return [form for form in fused_forms(candidate.collective) if self.find_unknown_size(form) is None]

    def _add_fused(self, alternatives: Alternatives, candidate: Candidate) -> None:
        """Add the fused form where it is predicted to be faster; else say in the miss why it is not."""
        known = self._fused_forms(candidate)
        forms = [form for form in known if form.cast is None]
        if len(forms) < len(known):
            forms[0] = replace(forms[0], why_no_cast="it is not measured; an override may request it")
        choice = choose_fused_form(forms[0], self.costs) if forms else None
        if choice is None:
            return
        alternatives.choice = alternatives.choice or choice
        if choice.strategy.mode is Mode.NONE:
            if (miss := alternatives.miss) is not None:
                alternatives.miss = replace(miss, detail=f"{miss.detail}; as one kernel: {choice.reason}")
            return
        most_us = choice.gain_us  # the largest form is preferred: less of it is for what another site has
        for form in forms:
            choice = choose_fused_form(form, self.costs)
            if choice is not None and choice.strategy.mode is not Mode.NONE:
                saved_us = min(choice.gain_us, most_us)
                benefit = self._benefit(form, saved_us, None)
                alternatives.ranked.append(Alternative(form, choice.strategy, saved_us, benefit, 0, choice))

    def _add_pipelined(self, alternatives: Alternatives, candidate: Candidate, override: Override | None) -> Miss | None:
        """Add the match, without some consumers, and with independent matmuls. Return a miss if the candidate is below the
        threshold."""
        forced = override.strategy if override else None
        match = pipelined(candidate, self.order)
        sites = [*([] if isinstance(match, Miss) else [match]), *_without_some_consumers(candidate.match)]
        if isinstance(match, Miss):
            alternatives.miss = alternatives.miss or match
        elif small := too_small(match, self.costs.policy, forced):
            return small
        failed: Miss | None = None
        for site in sites:
            if unknown := self.find_unknown_size(site):
                failed = failed or unknown
                continue
            form = choose_form(site, self.costs, override)
            choice = form.choice
            alternatives.choice = alternatives.choice or choice
            if site is match and not isinstance(match, Miss) and self.costs.policy.independent_matmuls == "auto":
                self._add_with_independent(alternatives, candidate, match, form, override)
            if choice is not None and choice.strategy.mode is Mode.NONE:
                failed = failed or Miss(Reason.NO_GAIN, choice.reason)
                continue
            saved_us = saved_us_of(site, choice)
            alternatives.ranked.append(self._pipelined_alternative(form, saved_us, override, is_match=site is match))
        if not alternatives.ranked:
            alternatives.miss = alternatives.miss or failed
        return None

    def _pipelined_alternative(
        self, form: PackedChoice, saved_us: float, override: Override | None, is_match: bool = False
    ) -> Alternative:
        forced, chunks = (override.strategy, override.chunks) if override else (None, 0)
        strategy = form.choice.strategy if form.choice else forced or Strategy(Mode.PIPELINED, chunks)
        site, benefit = form.site, self._benefit(form.site, saved_us, forced)
        bits, wire = self._bits_of(site.matmuls), self.costs.wire_dtype(site)
        return Alternative(site, strategy, saved_us, benefit, bits, form.choice, is_match, wire, form.reason)

    def _add_with_independent(
        self,
        alternatives: Alternatives,
        candidate: Candidate,
        match: Match,
        alone: PackedChoice,
        override: Override | None,
    ) -> None:
        """Add the match with sets of independent matmuls that save more than fewer of them.

        `alone`: its choice without any. With a requested strategy: sets of as many as are requested.
        """
        requested = override.independent if override and override.strategy else None
        if requested == 0 or match.matmuls[0].scales is not None or (requested is None and alone.choice is None):
            return
        fitting = [
            p
            for p in fitting_independent(match, candidate.independent_matmuls)
            if not self.find_unknown_size(Bulk(match.collective, (p,)))
        ]
        if not fitting:
            return
        forms = packed_forms(match, self.costs.neighbors)
        for indices, form, saved_us in self._sets.pipelined(match, forms, alone, override, fitting):
            own = next(own for own in (match, *forms) if isinstance(form.site, Match) and own.packs == form.site.packs)
            form = replace(form, site=replace(own, independent=tuple([fitting[i] for i in indices])))
            alternatives.ranked.append(self._pipelined_alternative(form, saved_us, override))

    def _add_bulk(
        self, alternatives: Alternatives, candidate: Candidate, forced: Strategy | DispatchTable | None
    ) -> Miss | None:
        """Add sets of independent matmuls. Return a miss if the candidate is below the threshold."""
        c = candidate.collective
        if not candidate.independent_matmuls or (self.costs.policy.independent_matmuls == "off" and not forced):
            return None
        if small := too_small(Bulk(c, candidate.independent_matmuls[:1]), self.costs.policy, forced):
            return small
        matmuls: list[Matmul] = []
        failed: Miss | None = None
        for p in candidate.independent_matmuls:
            if unknown := self.find_unknown_size(Bulk(c, (p,))):
                failed = unknown
            else:
                matmuls.append(p)
        self._add_sets(alternatives, candidate, matmuls, forced)
        if not alternatives.ranked:
            # The reason of the pipelined form explains more than "no independent matmul".
            no_gain = Miss(Reason.NO_GAIN, alternatives.choice.reason) if alternatives.choice else None
            alternatives.miss = alternatives.miss or failed or no_gain
        return None

    def _add_sets(
        self, alternatives: Alternatives, candidate: Candidate, matmuls: list[Matmul], forced: Strategy | DispatchTable | None
    ) -> None:
        """Add each set of `matmuls` that saves more than its subsets."""
        c = candidate.collective
        strategy = forced or Strategy(Mode.BULK)
        first, found = self._sets.bulk(c, matmuls, forced)
        alternatives.choice = alternatives.choice or first
        bits_of = [self._bit(p.node) for p in matmuls]
        for indices, choice, saved_us in found:
            matmul_bits = 0
            for i in indices:
                matmul_bits |= bits_of[i]
            site = Bulk(c, tuple([matmuls[i] for i in indices]))
            benefit = self._benefit(site, saved_us, forced)
            alternatives.ranked.append(Alternative(site, strategy, saved_us, benefit, matmul_bits, choice))

    def _benefit(self, site: Site, saved_us: float, forced: Strategy | DispatchTable | None) -> Benefit:
        if forced:  # a pipelined site has independent matmuls then only because they are requested too
            return Benefit(2 if site.independent and not isinstance(site, Bulk) else 1, 0, 0, saved_us)
        if self.costs.policy.is_forced:
            return Benefit(0, 1, 0 if isinstance(site, Bulk) else 1, saved_us)
        return Benefit(0, 0, 0, saved_us)

    def _bits_of(self, matmuls: tuple[Matmul, ...]) -> int:
        bits = 0
        for p in matmuls:
            bits |= self._bit(p.node)
        return bits

    def _bit(self, node: Node) -> int:
        return 1 << self._bits.setdefault(node, len(self._bits))


def _subtract_margin(alternatives: list[Alternative]) -> list[Alternative]:
    """Subtract the prediction error from the benefit of all alternatives but the simplest; drop those without benefit.

    The simplest is pipelined with all matmuls of the match. The margin is the one that cost/choice.py applies to more
    complicated strategies. A fused form has a margin of its own, against the plain form (cost/fused_choice.py).
    """
    simplest = next((a for a in alternatives if a.has_all_consumers and a.choice is not None), None)
    if simplest is None or simplest.choice is None:
        return alternatives
    plain = simplest.choice.predictions[str(NONE)]
    margin = margin_us(plain.us - simplest.choice.gain_us, plain)
    kept = [a.has_all_consumers or isinstance(a.site, Fused) for a in alternatives]
    reduced = [
        a if keep else replace(a, benefit=a.benefit.plus_us(-margin)) for a, keep in zip(alternatives, kept, strict=True)
    ]
    return [a for a, keep in zip(reduced, kept, strict=True) if keep or a.benefit > NO_BENEFIT]


def _without_some_consumers(match: Site | None) -> Iterator[Gather]:
    """Yield a gather without some of its consumers, which then read the gathered tensor.

    No remaining consumer reads the result of another.
    """
    if not isinstance(match, Gather):
        return
    nodes = [k.compute.node for k in match.consumers]
    for count in range(1, len(nodes)) if len(nodes) <= FEW else (1, len(nodes) - 1):
        for left_out in combinations(nodes, count):
            site = without(match, set(left_out))
            results = {k.compute.node for k in site.consumers}
            if not any(k.operand.node in results for k in site.consumers):
                yield site
