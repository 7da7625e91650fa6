"""The error for ranks that compiled different plans: which part differs first, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from .. import errors, plan_store, stored_file
from ..site_id import SiteId
from . import plan_graphs
from .store_exchange import Exchange


def load_plan_text(digest: str) -> str | None:
    """Return the text of a plan by the shared part of its digest, None where this machine lacks it.

    Never raise: it only makes a mismatch readable.
    """
    try:
        return plan_store.load(plan_store.find_digest(digest))
    except (OSError, ValueError):
        return None


def find_stored_site(site: SiteId) -> tuple[str, dict[str, Any]] | None:
    """Return (graph, row of the site in `Plan.shared`) of a site in its stored plan, None where there is none."""
    try:
        plan = json.loads(load_plan_text(site.digest) or "") if site.digest else {}
        return plan["graph"], next(row for row in plan["shared"]["sites"] if row["id"] == site.name)
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def plan_mismatch_error(
    exchange: Exchange, plans: Mapping[int, dict[str, Any]], mismatched: Sequence[int], suffix: str = ""
) -> errors.PlanMismatchError:
    """Return the error for `mismatched`, the ranks with another plan than this rank.

    `plans`: digest, site, text and packed graphs by rank, of this rank and of the first mismatched rank.
    `suffix`: completes the first line.
    """
    own, other = plans[exchange.rank], plans[mismatched[0]]
    ranks = [exchange.numbers[rank] for rank in mismatched]
    rank, first = exchange.number, ranks[0]
    difference = find_first_difference(own["text"], other["text"])
    if difference is None:
        difference = tuple(f"plan {plan['digest']}, at site '{plan['site']}'" for plan in (own, other))
    return errors.PlanMismatchError(
        f"{errors.ranks_text(ranks)} of the group compiled another plan than rank {rank}{suffix}",
        ranks=ranks,
        diff=plan_graphs.explain_difference(own.get("graphs", ""), other.get("graphs", ""), (f"rank {rank}", f"rank {first}")),
        where=f"{exchange.label} at site '{own['site']}'",
        got=f"rank {first}: {difference[1]}",
        expected=f"rank {rank}: {difference[0]}",
        fix=_fix(*difference),
    )


def _fix(own: str, other: str) -> str:
    if " scale=" in own and " scale=" in other:
        return "multiply by the same constant on all ranks, or by a tensor: a constant is applied after the reduction"
    return (
        "give all ranks the same model, shapes, options and device profile; look for rank-dependent code (only what a rank "
        "adds to a product before a reduction may differ)"
    )


def find_first_difference(own_text: str | None, other_text: str | None) -> tuple[str, str] | None:
    """Describe the first shared part (`Plan.shared`) in which two plans differ, as (own, other).

    None where the texts cannot be compared.
    """
    try:
        plans = [stored_file.parse_json(text or "", "a plan") for text in (own_text, other_text)]
        return _first_difference(plans, *(dict(plan["shared"]) for plan in plans))
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged, or of another version
        return None


def _first_difference(plans: Sequence[dict[str, Any]], own: dict[str, Any], other: dict[str, Any]) -> tuple[str, str] | None:
    for part in dict.fromkeys((*own, *other)):
        values = own.get(part), other.get(part)
        if values[0] == values[1]:
            continue
        if part in ("casts", "sites"):
            rows = enumerate(zip_longest(*(value or () for value in values)))
            index, (own_row, other_row) = next(((n, both) for n, both in rows if both[0] != both[1]), (0, (None, None)))
            if own_row is other_row:  # one plan lacks the part: it is of another version
                continue
            details = [plan[part][index] if index < len(plan.get(part, ())) else {} for plan in plans]
            if part == "sites":
                return _describe_site(own_row, other_row, details[0]), _describe_site(other_row, own_row, details[1])
            return _describe_cast(own_row, details[0]), _describe_cast(other_row, details[1])
        label = _PART_LABELS.get(part, part)
        return _describe_value(label, values[0]), _describe_value(label, values[1])
    return None


_PART_LABELS = {"profile": "device profile"}
"""Labels of parts of `Plan.shared` whose key is not clear by itself."""


def _describe_value(label: str, value: Any) -> str:
    return f"{label} {value}" if value else f"no {label}"


def _describe_cast(row: dict[str, Any] | None, details: dict[str, Any]) -> str:
    """Return "float8: forward matmul of 'layers.0.w1' in 16 bits (filtered: the fp8 filter refuses ...)".

    `details`: has the reason.
    """
    if row is None:
        return "float8: no such matmul"
    how = f"by {row['recipe']}" if row["recipe"] else "in 16 bits" + _reason_text(details)
    return f"float8: {row['role']} matmul of '{row['module']}' {how}"


def _describe_site(row: dict[str, Any] | None, other: dict[str, Any] | None, details: dict[str, Any]) -> str:
    """Return "site id=forward.0 kind=all_gather strategy=none", the other fields that differ, and the reason in `details`."""
    if row is None:
        return "site no such site"
    leading = ("id", "kind", "strategy")
    rest = [key for key in row if key not in leading and other is not None and row[key] != other.get(key)]
    return "site " + " ".join(f"{key}={row[key]}" for key in (*leading, *rest) if key in row) + _reason_text(details)


def _reason_text(details: dict[str, Any]) -> str:
    """Return " (non_linear: relu does not commute with the reduction)", "" without a reason."""
    reason = details.get("reason")
    return f" ({': '.join(filter(None, (reason, details.get('detail'))))})" if reason else ""
