"""What every rank has compiled, told to the ranks of its groups: read only by a rank whose peers did not come.

Plans are compared when an op of theirs is called first. A rank that overlaps a site which another leaves alone waits there for
one that never comes: it has no such op. Nor does one come that quantises what it gathers, and waits to agree on a scale. So a
rank that compiles a graph leaves a notice in the Store of each group in it, for which nobody waits, under what the graph is
whatever is decided on it (Plan.graph). A rank whose deadline for its peers is over looks for theirs, and can say that they made
another plan of the same graph. Never earlier: a peer may still be compiling, and one that found its graph in a compile cache
leaves no notice.

A notice lists the last plans that a rank made of a graph, for as long as the process group lives: which of them an op belongs
to is not known here. One that has dropped older plans says so, and then accuses nobody.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from ub_overlap import _torch_compat as compat

from .. import errors
from . import plan_graphs
from .plan_mismatch import plan_mismatch, plan_text
from .store_exchange import Exchange

MOST = 16
"""Plans of one graph that a notice lists."""
_lock = threading.Lock()  # Inductor compiles on several threads
_left: weakref.WeakKeyDictionary[Any, dict[str, list[str]]] = weakref.WeakKeyDictionary()
"""By process group, whose name another may bear later, and by graph: digests, the last one last."""


def _key(group: str, graph: str, rank: int) -> str:
    return f"ub_overlap/notices/{group}/{graph}/{rank}"


def leave(groups: Iterable[str], graph: str, digest: str) -> None:
    """Tells the other ranks of `groups` (c10d names) that `graph` became the plan `digest` here. Never an error."""
    for group in groups:
        with contextlib.suppress(Exception), _lock:
            if compat.is_fake_group(group):
                continue
            members = compat.group_of(group)
            digests = _left.setdefault(members, {}).setdefault(graph, [])
            if digest in digests:
                digests.remove(digest)
            digests.append(digest)
            if dropped := len(digests) > MOST:
                del digests[0 : -MOST - 1]  # one more than is told says that there were more
            notice = {"digests": digests[-MOST:], "dropped": dropped, "digest": digest, "site": "none of this plan"}
            compat.store_of(members).set(_key(group, graph, members.rank()), json.dumps(notice))


def explained(exchange: Exchange, topic: str, digest: str, late: errors.PeerTimeoutError) -> errors.UbOverlapError:
    """`late`, or the PlanMismatchError that says why its ranks did not come to `topic`, an exchange for the plan `digest`."""
    text = plan_text(digest) if late.phase == topic else None
    try:
        graph = json.loads(text or "")["graph"]
    except (ValueError, KeyError, TypeError):
        return late
    cards = {rank: notice for rank in late.ranks if (notice := exchange.look(_key(exchange.group, graph, rank))) is not None}
    other = [rank for rank, notice in cards.items() if digest not in notice["digests"] and not notice.get("dropped")]
    if not other:
        return late
    first = cards[other[0]]
    first["text"], first["graphs"] = plan_text(first["digest"]), plan_graphs.packed(first["digest"])
    cards[exchange.rank] = {"digest": digest, "site": exchange.site, "text": text, "graphs": plan_graphs.packed(digest)}
    return plan_mismatch(exchange, cards, other, ", and did not come to this op")
