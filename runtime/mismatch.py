"""Plans that ranks should have in common and have not: what differs first, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import errors, plan_store, rank_graphs
from .exchange import Exchange


def plan_text(digest: str) -> str | None:
    """The text of a plan where this machine has it. Never an error: it only makes a mismatch readable."""
    try:
        return plan_store.load(digest)
    except (OSError, ValueError):
        return None


def plan_mismatch(
    exchange: Exchange, cards: Mapping[int, dict[str, Any]], other: Sequence[int], also: str = ""
) -> errors.PlanMismatchError:
    """`cards`: digest, site, text and packed graphs of the plans of this rank and of the first of `other`, the ranks with
    other plans. `also` completes the first line."""
    rank, first = exchange.rank, other[0]
    mine, theirs = cards[rank], cards[first]
    difference = first_difference(mine["text"], theirs["text"])
    if difference is None:
        here, there = f"plan {mine['digest']}, at site '{mine['site']}'", f"plan {theirs['digest']}, at site '{theirs['site']}'"
    else:
        here, there = difference
    return errors.PlanMismatchError(
        f"{errors.ranks_text(other)} of the group compiled another plan than rank {rank}{also}",
        ranks=other,
        diff=rank_graphs.told(mine.get("graphs", ""), theirs.get("graphs", ""), (f"rank {rank}", f"rank {first}")),
        where=f"group '{exchange.group}' at site '{mine['site']}'",
        got=f"rank {first}: {there}",
        expected=f"rank {rank}: {here}",
        fix="give all ranks the same model, shapes, options and device profile; look for rank-dependent code",
    )


_TOLD = ("predicted", "work", "detail", "matmuls", "source", "flops")
"""What a plan tells of a site beside what all ranks must have in common: ranks with other local sizes may reckon otherwise."""


def _decided(site: Any) -> Any:
    return {key: value for key, value in site.items() if key not in _TOLD} if isinstance(site, dict) else site


def first_difference(mine: str | None, theirs: str | None) -> tuple[str, str] | None:
    """The device profile, or the first site, that two plans do not have in common, as each of them has it; None where that
    cannot be told."""

    def show(site: Any) -> str:
        if not isinstance(site, dict):
            return "no such site"
        first = [f"{key}={site[key]}" for key in ("id", "kind", "strategy") if key in site]
        return " ".join(first) or json.dumps(site)

    try:
        plans = [json.loads(text or "") for text in (mine, theirs)]
        a, b = ([_decided(site) for site in plan["sites"]] for plan in plans)
        here, there = (f"device profile {plan['profile']}" if plan.get("profile") else "no device profile" for plan in plans)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if here != there:
        return here, there
    for i in range(max(len(a), len(b))):
        x, y = (sites[i] if i < len(sites) else None for sites in (a, b))
        if x != y:
            if show(x) != show(y) or not (isinstance(x, dict) and isinstance(y, dict)):
                return f"site {show(x)}", f"site {show(y)}"
            keys = [key for key in sorted({*x, *y}) if x.get(key) != y.get(key)]
            return tuple(f"site {show(s)} " + " ".join(f"{k}={s.get(k)}" for k in keys) for s in (x, y))  # type: ignore[return-value]
    return None
