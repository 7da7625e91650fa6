"""options={"on_unmatched": ...}: what to do when a collective next to a matmul is not matched."""

from __future__ import annotations

import warnings

from ub_overlap.runtime.errors import MissError

from .options import Options
from .plan.decision import Decision
from .plan.outcome import BY_CHOICE
from .plan.plan import Plan
from .plan.reasons import Kind, Reason
from .plan.strategy import Mode


def find_unmatched(plan: Plan) -> list[Decision]:
    """Return the decisions of `plan` that a user who wants overlap would ask about."""
    left_alone = [d for d in plan.decisions if d.strategy.mode is Mode.NONE and d.reason not in BY_CHOICE]
    return [d for d in left_alone if not _exchanges_counts(d)]


def _exchanges_counts(d: Decision) -> bool:
    """Return whether a decision is that of an exchange of integers: counts of rows, which the graph needs at once."""
    return d.kind is Kind.ALL_TO_ALL and d.reason is Reason.DTYPE_UNSUPPORTED and "int" in d.dtype


def report_unmatched(plan: Plan, options: Options) -> None:
    """Raise MissError, warn, or do nothing, as `options.on_unmatched` says."""
    decisions = find_unmatched(plan)
    if not decisions or options.on_unmatched == "ignore":
        return
    lines = [
        f"{d.id} {d.kind.value} at {d.source or d.module or 'unknown source'}: {d.reason.value}: {d.detail}"
        for d in decisions
        if d.reason
    ]
    if options.on_unmatched == "error":
        raise MissError(
            what=f"{len(decisions)} of {len(plan.decisions)} collectives could not be overlapped",
            where="; ".join(lines),
            got="on_unmatched='error'",
            expected="every collective next to a matmul is matched",
            fix="change the code at the lines above, or set on_unmatched='warn'",
        )
    warnings.warn("ub_overlap: not overlapped: " + "; ".join(lines), stacklevel=2)
