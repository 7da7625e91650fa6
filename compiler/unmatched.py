"""options={"on_unmatched": ...}: what a collective that sits at a matmul and could not be matched causes."""

from __future__ import annotations

import warnings

from ub_overlap.runtime.errors import MissError

from .options import Options
from .plan.decision import Decision
from .plan.plan import Plan
from .plan.reasons import Reason
from .plan.strategy import Mode

# Left alone by choice, or with nothing to hide behind: no missed candidates.
NOT_MISSED = {
    Reason.DISABLED_BY_USER,
    Reason.BELOW_THRESHOLD,
    Reason.NO_GAIN,
    Reason.NO_MATMUL,
    Reason.TRIVIAL_GROUP,
    Reason.MATMUL_TAKEN,
    Reason.SCALES,
}


def missed(plan: Plan) -> list[Decision]:
    """The decisions of `plan` that a user who wants overlap would ask about."""
    return [d for d in plan.decisions if d.strategy.mode is Mode.NONE and d.reason not in NOT_MISSED]


def handle_misses(plan: Plan, options: Options) -> None:
    """MissError, a warning, or nothing, as `options.on_unmatched` says."""
    found = missed(plan)
    if not found or options.on_unmatched == "ignore":
        return
    lines = [
        f"{d.id} {d.kind.value} at {d.source or d.module or 'unknown source'}: {d.reason.value}: {d.detail}"
        for d in found
        if d.reason
    ]
    if options.on_unmatched == "error":
        raise MissError(
            what=f"{len(found)} of {len(plan.decisions)} collectives could not be overlapped",
            where="; ".join(lines),
            got="on_unmatched='error'",
            expected="every collective that meets a matmul matched",
            fix="change the code at the lines above, or set on_unmatched='warn'",
        )
    warnings.warn("ub_overlap: not overlapped: " + "; ".join(lines), stacklevel=2)
