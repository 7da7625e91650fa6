"""The requests of the user for the candidates of a graph."""

from __future__ import annotations

from ..match import Candidate
from ..options import Options
from ..overrides.requested_strategy import Override
from ..plan.reasons import Reason
from ..reports.describe_site import describe_candidate
from .decision_record import kinds_of


def find_overrides(candidates: list[Candidate], options: Options, phase: str) -> dict[str, Override]:
    """Return the request for each candidate that has one, by site id. OptionError where a saved plan does not fit."""
    if not candidates or not options.overrides:
        return {}
    requestable = [(i, c) for i, c in enumerate(candidates) if c.miss is None or c.miss.reason is not Reason.SCALES]
    return options.overrides.find(phase, [describe_candidate(c, f"{phase}.{i}", phase, kinds_of(c)) for i, c in requestable])
