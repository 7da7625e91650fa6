"""The requests of the user for the candidates of a graph."""

from __future__ import annotations

from ..graph.joint_graph import half_of, is_in_backward
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
    is_marked = any(is_in_backward(c.collective.node) for c in candidates)

    def half(candidate: Candidate) -> str:
        """The phase that rules match: in the graph of a whole step the half that computes the collective, "" if unknown."""
        if phase != "step":
            return phase
        return half_of(candidate.collective.node) if is_marked else ""

    return options.overrides.find(phase, [describe_candidate(c, f"{phase}.{i}", half(c), kinds_of(c)) for i, c in requestable])
