"""Times of our ops for Inductor's overlap scheduling (aten_distributed_optimizations.enable_overlap_scheduling).

The scheduler asks how long each op takes that counts operations. Without an estimate it runs the op to time it, while it
compiles. Our ops communicate, so that would wait for ranks that do not compile this graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.site_id import SiteId

from ..cost.profile_lookup import load, of_plan
from ..graph.aten import c10d
from ..graph.emitter import SITE
from ..match.collectives import is_collective
from ..reports.history import HISTORY
from ..reports.outlook import outlook

SCHEDULES = "aten_distributed_optimizations.enable_overlap_scheduling"
ESTIMATES = "aten_distributed_optimizations.custom_runtime_estimation"
Estimate = Callable[..., float | None]
"""(node, [size instead of its own]) -> milliseconds, or None."""


def estimate_own_ops(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options to add to `options`, Inductor's: none where its overlap scheduling is off."""
    if not compat.inductor_option(SCHEDULES, options):
        return {}
    return {ESTIMATES: functools.partial(estimate_ms, compat.inductor_option(ESTIMATES, options) or torchs_estimate)}


def estimate_ms(others: Estimate, node: Node, override_size: int | None = None) -> float | None:
    """Return the time of our ops, and for other nodes that of `others`."""
    own = estimate_own_ms(node)
    return others(node, override_size) if own is None else own


def torchs_estimate(node: Node, override_size: int | None = None) -> float | None:
    """Return Inductor's own estimate where it makes none as soon as there is a function: of nodes in between."""
    counts = getattr(node.target, "overloadpacket", None) in flop_registry
    is_call = node.op == "call_function" and isinstance(node.target, compat.OpOverload)
    if counts or not is_call or is_collective(node) or node.target is c10d.wait_tensor.default:
        return None
    return compat.roofline_ms(node) or None


def estimate_own_ms(node: Node) -> float | None:
    """Return the predicted milliseconds of one of our ops, 0 where its site has no prediction. None for other nodes."""
    packet = getattr(node.target, "overloadpacket", None)
    if getattr(node.target, "namespace", "") != "ub_overlap" or packet not in flop_registry:
        return None
    site = SiteId.parse(node.meta.get(SITE, ""))
    plan = HISTORY.find(site.digest) if site.digest else None
    decision = next((d for d in plan.decisions if d.id == site.name), None) if plan is not None else None
    if plan is None or decision is None:
        return 0.0
    profile = of_plan(plan.profile, decision.ranks) or load(None, decision.ranks)
    predicted = outlook(decision, profile)
    return predicted.chosen.us / 1e3 if predicted is not None else 0.0
