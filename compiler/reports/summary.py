"""Logs: one line per process at WARNING, per graph at INFO, every decision at DEBUG.

Plan, reasons and diff are artifacts of TORCH_TRACE.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from ub_overlap import _torch_compat as compat

from ..plan.decision import Decision
from ..plan.plan import Plan
from ..plan.strategy import Mode

log = logging.getLogger("ub_overlap")


def format_plan(plan: Plan) -> str:
    """Return e.g. "backward 3f2a...: 7 of 8 collectives overlapped (all_gather_matmul 3, ...); left alone: no_matmul 1"."""
    text = f"{plan.phase} {plan.digest}: {_format_counts(plan, by_kind=True)}"
    if saved := sum(d.saved_bytes or 0 for d in plan.decisions):
        text += f"; each rank sends {saved} bytes less than traced"
    if plan.casts:
        text += f"; float8 {sum(bool(c.recipe) for c in plan.casts)} of {len(plan.casts)} products"
        stay = Counter(c.reason.value for c in plan.casts if c.reason)
        if stay:
            text += "; left in high precision: " + ", ".join(f"{k} {v}" for k, v in sorted(stay.items()))
    return text


def _format_counts(plan: Plan, by_kind: bool) -> str:
    """Return "7 of 9 collectives overlapped (...); merged into others: 1; left alone: no_matmul 1": each in one count."""
    done = [d for d in plan.decisions if d.overlapped]
    merged = sum(d.strategy.mode is Mode.MERGED for d in plan.decisions)
    left = Counter(
        d.reason.value if d.reason else "no reason"
        for d in plan.decisions
        if not d.overlapped and d.strategy.mode is not Mode.MERGED
    )
    text = f"{len(done)} of {len(plan.decisions)} collectives overlapped"
    if done and by_kind:
        text += f" ({_format_counter(Counter(f'{d.kind.value} {d.strategy.mode.value}' for d in done))})"
    if merged:
        text += f"; merged into others: {merged}"
    return text + (f"; left alone: {_format_counter(left)}" if left else "")


def _format_counter(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


class _FirstPlan:
    """Whether this process has logged its first plan at WARNING."""

    is_logged = False


def log_first_plan(plan: Plan, overlap: str) -> None:
    """Log at the default level, on rank 0, what became of the collectives of the first graph that has some.

    `overlap`: the option. Where it is off, nothing is logged.
    """
    if _FirstPlan.is_logged or not plan.decisions or overlap == "off" or not compat.is_first_rank():
        return
    _FirstPlan.is_logged = True
    log.warning(
        "first graph with collectives (%s): %s. ub_overlap.reports() has the reasons, and all graphs (said once)",
        plan.phase, _format_counts(plan, by_kind=False),
    )  # fmt: skip


def announce_plan(plan: Plan, overlap: str) -> None:
    """Log the plan, and write it to TORCH_TRACE. `overlap`: the option."""
    log_first_plan(plan, overlap)
    log.info("%s", format_plan(plan))
    for c in plan.casts:
        log.debug("%s %s %s: %s %s", c.module, c.role, c.shape, c.recipe or (c.reason.value if c.reason else ""), c.detail)
    for d in plan.decisions:
        log.debug("%s", format_decision(d))
    trace_artifact(f"plan_{plan.phase}", "json", plan.to_json)
    trace_artifact(
        f"reasons_{plan.phase}", "string", lambda: "\n".join([format_plan(plan), *map(format_decision, plan.decisions)])
    )


def format_decision(d: Decision) -> str:
    """Return e.g. "forward.0 all_reduce: none (non_linear: relu ...) model.py:12: ..."."""
    why = ": ".join(filter(None, (d.reason.value if d.reason else "", d.detail)))
    return f"{d.id} {d.kind.value}: {d.strategy}{f' ({why})' if why else ''} {d.source}"


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Write a text to TORCH_TRACE as "ub_overlap_<name>". It is computed only if tracing is on."""
    compat.trace_structured(
        "artifact", metadata_fn=lambda: {"name": f"ub_overlap_{name}", "encoding": encoding}, payload_fn=payload
    )
