"""Sessions of this process by the group that the user named: they fail together.

A hierarchical collective runs on groups of ours (host_groups.py). A rank that waits in one of them may wait for a rank that
waits in another one, for a third. So a session that fails tells those of the same origin which rank is at fault. Groups with an
arena tell each other in C++ (csrc/core/origin_group.h). Those whose collectives c10d runs learn of it through their Store.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from .. import errors
from ..extension import extension
from .store_exchange import Exchange

_lock = threading.Lock()
_sessions: weakref.WeakKeyDictionary[Any, Exchange] = weakref.WeakKeyDictionary()


def add(session: Any, exchange: Exchange) -> None:
    """Let the other sessions of its origin tell `session` of their failures."""
    with _lock:
        _sessions[session] = exchange


def tell(failed: Exchange, error: errors.RankError, plain_only: bool = False) -> None:
    """Tell the other sessions of the origin of `failed` of its error. `plain_only`: those without an arena."""
    with _lock:
        others = [(session, exchange) for session, exchange in _sessions.items() if exchange is not failed]
    for session, exchange in others:
        if exchange.origin_key != failed.origin_key:
            continue
        if session.arena_core is None:
            if exchange.is_part:
                exchange.tell_of_other_group(error)
        elif not plain_only:
            extension().Arena.fail(session.arena_core, error, failed.op, failed.site)
