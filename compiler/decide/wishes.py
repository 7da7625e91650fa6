"""What the user forces: by a saved plan, by a plan, by rules."""

from __future__ import annotations

from ..forced.rule import Forced, Place
from ..forced.rules import UNMATCHED, forced_by_rules
from ..forced.saved import fit
from ..options import Options
from ..plan import Reason
from ..reports.describe import place_of
from ..sites import Candidate
from .record import kinds_of


def wishes_of(candidates: list[Candidate], options: Options, phase: str) -> dict[str, Forced]:
    """What the user forces, by site id: the plan, else the last rule that matches. OptionError where a whole saved plan does
    not fit the graph."""
    if not candidates or not (options.plan or options.rules or options.saved):
        return {}
    own = [(i, c) for i, c in enumerate(candidates) if c.miss is None or c.miss.reason is not Reason.SCALES]
    places = [place_of(c, f"{phase}.{i}", phase, kinds_of(c)) for i, c in own]
    UNMATCHED.check(phase, places, () if options.saved else [pattern for pattern, _ in options.plan], options.rules)
    saved = fit(options.saved, phase, places)

    def wish(place: Place) -> Forced | None:
        by_plan = saved.get(place.id) if options.saved else options.forced_by_plan(place.id)
        return by_plan or forced_by_rules(options.rules, place)

    return {p.id: found for p in places if (found := wish(p)) is not None}
