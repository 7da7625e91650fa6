"""Plans that ranks should have in common and have not: what differs first, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from .. import errors, plan_store
from . import plan_graphs
from .store_exchange import Exchange


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
        diff=plan_graphs.told(mine.get("graphs", ""), theirs.get("graphs", ""), (f"rank {rank}", f"rank {first}")),
        where=f"group '{exchange.group}' at site '{mine['site']}'",
        got=f"rank {first}: {there}",
        expected=f"rank {rank}: {here}",
        fix="give all ranks the same model, shapes, options and device profile; look for rank-dependent code",
    )


def first_difference(mine: str | None, theirs: str | None) -> tuple[str, str] | None:
    """The first part that two plans should have in common (`Plan.shared`) and have not, as each of them has it; None where that
    cannot be told."""
    try:
        plans = [json.loads(text or "") for text in (mine, theirs)]
        a, b = (dict(plan["shared"]) for plan in plans)
    except (ValueError, KeyError, TypeError):
        return None
    for part in dict.fromkeys((*a, *b)):
        x, y = a.get(part), b.get(part)
        if x == y:
            continue
        if part in ("casts", "sites"):
            rows = enumerate(zip_longest(x or (), y or ()))
            n, row, other = next(((n, *both) for n, both in rows if both[0] != both[1]), (0, None, None))
            if row is other:  # one of them has no such part: of another version
                continue
            if part == "sites":
                return _site(row, other), _site(other, row)
            said = [plan["casts"][n] if n < len(plan.get("casts", ())) else {} for plan in plans]
            return _cast(row, said[0]), _cast(other, said[1])
        here, there = (f"{_PARTS.get(part, part)} {value}" if value else f"no {_PARTS.get(part, part)}" for value in (x, y))
        return here, there
    return None


_PARTS = {"profile": "device profile"}
"""What a part of `Plan.shared` is called where its name does not say."""


def _cast(row: dict[str, Any] | None, why: dict[str, Any]) -> str:
    """E.g. "float8: forward product of 'layers.0.w1' in 16 bits (filtered: the fp8 filter refuses ...)"; `why` has the reason."""
    if row is None:
        return "float8: no such product"
    said = ": ".join(filter(None, (why.get("reason"), why.get("detail"))))
    how = f"by {row['recipe']}" if row["recipe"] else "in 16 bits" + (f" ({said})" if said else "")
    return f"float8: {row['role']} product of '{row['module']}' {how}"


def _site(row: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """E.g. "site id=forward.0 kind=all_gather_matmul strategy=none", and the rest that differs."""
    if row is None:
        return "site no such site"
    named = ("id", "kind", "strategy")
    rest = [key for key in row if key not in named and other is not None and row[key] != other.get(key)]
    return "site " + " ".join(f"{key}={row[key]}" for key in (*named, *rest) if key in row)
