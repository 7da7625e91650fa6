"""Graphs behind plans that differ between ranks: packed, sent with the plans, and compared by a function of the compiler.

The runtime cannot read graphs. It sends them packed, from plan_store to the other ranks, and puts the text of `explain` into
the error. A failure on the way loses the explanation, never the error.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable

from .. import plan_store

log = logging.getLogger(__name__)

MAX_BYTES = 2 << 20
"""Largest packed graphs sent through the Store (about 100,000 nodes). Every rank reads the graphs of one other rank."""

Explain = Callable[[bytes, bytes, tuple[str, str]], str]
"""(graphs of one rank, graphs of another, the ranks' names) -> description of the differences."""


class _Installed:
    explain: Explain | None = None


def install(explain: Explain) -> None:
    """Set the function that describes how two graphs differ."""
    _Installed.explain = explain


def pack_graphs(digest: str) -> str:
    """Return the graphs of a plan, by the shared part of its digest, as text; "" where there are none or they are too large."""
    try:
        data = plan_store.load_graphs(plan_store.find_digest(digest)) if _Installed.explain else None
    except (OSError, ValueError):
        return ""
    return base64.b64encode(data).decode() if data and len(data) <= MAX_BYTES else ""


def explain_difference(own: str, other: str, names: tuple[str, str]) -> str:
    """Describe how two ranks' packed graphs differ, "" where they cannot be compared."""
    explain = _Installed.explain
    if explain is None or not own or not other or len(other) > 2 * MAX_BYTES:  # `other` comes from a peer
        return ""
    try:
        return explain(base64.b64decode(own), base64.b64decode(other), names)
    except Exception:  # the mismatch error in progress matters more than this explanation
        log.warning("cannot compare the graphs of %s and %s", *names, exc_info=True)
        return ""
