"""Logs: one line per graph at INFO, every decision at DEBUG. Plan, reasons and diff are artifacts of TORCH_TRACE."""

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
    done = Counter(f"{d.kind.value} {d.strategy.mode.value}" for d in plan.decisions if d.overlapped)
    left = Counter(d.reason.value for d in plan.decisions if d.reason)
    text = f"{plan.phase} {plan.digest}: {sum(done.values())} of {len(plan.decisions)} collectives overlapped"
    if done:
        text += " (" + ", ".join(f"{k} {v}" for k, v in sorted(done.items())) + ")"
    if merged := sum(d.strategy.mode is Mode.MERGED for d in plan.decisions):
        text += f"; merged into others: {merged}"
    if left:
        text += "; left alone: " + ", ".join(f"{k} {v}" for k, v in sorted(left.items()))
    if saved := sum(d.saved_bytes or 0 for d in plan.decisions):
        text += f"; each rank sends {saved} bytes less than traced"
    if plan.casts:
        text += f"; float8 {sum(bool(c.recipe) for c in plan.casts)} of {len(plan.casts)} products"
        stay = Counter(c.reason.value for c in plan.casts if c.reason)
        if stay:
            text += "; left in high precision: " + ", ".join(f"{k} {v}" for k, v in sorted(stay.items()))
    return text


def announce_plan(plan: Plan) -> None:
    """Log the plan, and write it to TORCH_TRACE."""
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
