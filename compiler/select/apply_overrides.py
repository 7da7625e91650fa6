"""What the user forces: by a saved plan, by a plan, by rules."""

from __future__ import annotations

from ..match import Candidate
from ..options import Options
from ..overrides.rule import Override, SiteDescription
from ..overrides.rules import UNMATCHED, forced_by_rules
from ..overrides.saved_plan import fit
from ..plan.reasons import Reason
from ..reports.describe_site import place_of
from .decision_record import kinds_of


def wishes_of(candidates: list[Candidate], options: Options, phase: str) -> dict[str, Override]:
    """What the user forces, by site id: the plan, else the last rule that matches. OptionError where a whole saved plan does
    not fit the graph."""
    if not candidates or not (options.plan or options.rules or options.saved):
        return {}
    own = [(i, c) for i, c in enumerate(candidates) if c.miss is None or c.miss.reason is not Reason.SCALES]
    places = [place_of(c, f"{phase}.{i}", phase, kinds_of(c)) for i, c in own]
    UNMATCHED.check(phase, places, () if options.saved else [pattern for pattern, _ in options.plan], options.rules)
    saved = fit(options.saved, phase, places)

    def wish(place: SiteDescription) -> Override | None:
        by_plan = saved.get(place.id) if options.saved else options.forced_by_plan(place.id)
        return by_plan or forced_by_rules(options.rules, place)

    return {p.id: found for p in places if (found := wish(p)) is not None}
