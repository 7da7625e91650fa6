"""Announcements of compiled plans to the other ranks. A rank reads them only after its peers timed out.

Ranks compare plans at the first call of an op of the plan. That comparison hangs where only one rank overlaps a site: the
other ranks have no such op. It also hangs where only one rank quantizes what it gathers and waits to agree on a scale. So a
rank that compiles a graph leaves an announcement in the Store of each group of that graph. No rank waits for it. Its key
identifies the graph independently of the decisions on it (Plan.graph). After a timeout a rank reads its peers' announcements
and can report that they compiled another plan for the same graph. It does not look earlier: a peer may still be compiling.
A peer that loaded its graph from a compile cache leaves no announcement.

An announcement lists the last plans of a graph on one rank, for the lifetime of the process group. It does not say which of
them an op belongs to. An announcement that dropped older plans says so, and is then no evidence of a mismatch.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from ub_overlap import _torch_compat as compat

from .. import errors, stored_file
from . import plan_graphs
from .inherited_groups import is_inherited
from .plan_mismatch import load_plan_text, plan_mismatch_error
from .presence import announce_process
from .store_exchange import Exchange

MAX_PLANS = 16
"""Plans per graph in one announcement."""
_lock = threading.Lock()  # Inductor compiles on several threads
_announced: weakref.WeakKeyDictionary[Any, dict[str, list[str]]] = weakref.WeakKeyDictionary()
"""Digests by process group object (names are reused) and graph, the newest last."""


def _key(group: str, graph: str, rank: int) -> str:
    return f"ub_overlap/plans/{group}/{graph}/{rank}"


def announce_plan(groups: Iterable[str], graph: str, digest: str) -> None:
    """Announce to the other ranks of `groups` (c10d names) that `graph` became the plan `digest` here. Never raise."""
    for group in groups:
        with contextlib.suppress(Exception), _lock:
            if compat.is_fake_group(group):
                continue
            members = compat.group_of(group)
            if is_inherited(members):
                continue
            digests = _announced.setdefault(members, {}).setdefault(graph, [])
            if digest in digests:
                digests.remove(digest)
            digests.append(digest)
            if dropped := len(digests) > MAX_PLANS:
                del digests[0 : -MAX_PLANS - 1]  # keep one more than announced: it records that plans were dropped
            announcement = {
                "digests": digests[-MAX_PLANS:],
                "dropped": dropped,
                "digest": digest,
                "site": "none of this plan",
            }
            announce_process(members)
            compat.store_of(members).set(_key(group, graph, members.rank()), json.dumps(announcement))


def explain_timeout(exchange: Exchange, topic: str, digest: str, timeout: errors.PeerTimeoutError) -> errors.UbOverlapError:
    """Return a PlanMismatchError where announcements explain why ranks did not join `topic` for `digest`, else `timeout`."""
    text = load_plan_text(digest) if timeout.phase == topic else None
    try:
        graph = stored_file.parse_json(text or "", "a plan")["graph"]
    except (ValueError, KeyError, TypeError):
        return timeout
    plans = {
        rank: announcement
        for rank in map(exchange.numbers.index, timeout.ranks)
        if (announcement := exchange.read_key(_key(exchange.group, graph, rank))) is not None
    }
    mismatched = [rank for rank, plan in plans.items() if digest not in plan["digests"] and not plan.get("dropped")]
    if not mismatched:
        return timeout
    first = plans[mismatched[0]]
    first["text"], first["graphs"] = load_plan_text(first["digest"]), plan_graphs.pack_graphs(first["digest"])
    plans[exchange.rank] = {
        "digest": digest,
        "site": exchange.site,
        "text": text,
        "graphs": plan_graphs.pack_graphs(digest),
    }
    return plan_mismatch_error(exchange, plans, mismatched, ", and did not reach this op")
