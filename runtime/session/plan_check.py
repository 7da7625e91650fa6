"""The check at a plan's first call: all ranks of the group must be about to run the same plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from .. import errors
from ..site_id import SiteId
from . import plan_announcements, plan_graphs
from .host_layout import HOST_GROUP
from .plan_mismatch import find_stored_site, load_plan_text, plan_mismatch_error
from .store_exchange import Exchange


def check_group_size(group: str, ranks: int, site: str) -> None:
    """Raise PlanMismatchError where the plan of `site` was made for another number of ranks than the group has.

    Graphs hold the names of groups. So a graph that was compiled before the groups were made again finds a new group.
    The groups of hierarchical collectives are checked when they are made (host_groups.py).
    """
    if HOST_GROUP.fullmatch(group):
        return
    stored = find_stored_site(SiteId.parse(site))
    planned = stored[1].get("ranks") if stored else None
    if planned in (None, ranks):
        return
    raise errors.PlanMismatchError(
        f"a graph that was compiled for {planned} ranks runs on a group of {ranks}",
        where=f"group '{group}' at site '{site}'",
        got=f"{ranks} ranks",
        expected=f"{planned} ranks",
        fix="call torch.compiler.reset() after process groups were made again: the model is then compiled for them",
    )


def check_plans(exchange: Exchange, number: int, digest: str, slot_bytes: int, check: Callable[[], None]) -> int:
    """Compare plan digests over all ranks and return the largest slot size requested with them.

    `number`: plans that this session has checked, this one included. `slot_bytes`: this rank's request, 0 for none.
    `check`: raises when a peer has failed. PlanMismatchError names the ranks with another plan, and the first difference.
    """
    topic = f"plan/{number}"
    own = {"digest": digest, "site": exchange.site, "slot": slot_bytes}
    try:
        plans = exchange.gather(topic, own, "init", f"the first call of plan {digest}", check)
    except errors.PeerTimeoutError as timeout:
        raise plan_announcements.explain_timeout(exchange, topic, digest, timeout) from None
    mismatched = [rank for rank, plan in enumerate(plans) if plan["digest"] != digest]
    if mismatched:  # all ranks have detected the mismatch: exchange the long texts only now
        raise _compare_texts(exchange, number, plans, mismatched, check)
    return max(plan["slot"] for plan in plans)


def _compare_texts(
    exchange: Exchange, number: int, plans: Sequence[dict[str, Any]], mismatched: Sequence[int], check: Callable[[], None]
) -> errors.PlanMismatchError:
    """Return how this rank's plan differs from that of the first mismatched rank.

    Only two ranks' texts are ever read: those of rank 0 and of the first rank whose plan differs from rank 0's.
    """
    senders = (0, next(rank for rank, plan in enumerate(plans) if plan["digest"] != plans[0]["digest"]))
    digest = plans[exchange.rank]["digest"]
    own = {"text": load_plan_text(digest), "graphs": plan_graphs.pack_graphs(digest)}
    sent = own if exchange.rank in senders else None

    def check_alive() -> None:
        with contextlib.suppress(errors.PeerFailedError):  # a rank that has its text already has raised the mismatch
            check()

    texts = exchange.gather_from(mismatched[:1], f"text/{number}", sent, "init", "compare plans", check_alive)
    texts[exchange.rank] = own
    return plan_mismatch_error(exchange, {rank: {**plans[rank], **text} for rank, text in texts.items()}, mismatched)
