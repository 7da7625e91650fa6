"""The graphs of ranks whose plans differ: sent beside the plans, and compared by what the compiler installs here.

The runtime knows no graphs. It carries them, packed, from plan_store to the other ranks, and puts what `explain` says into the
error. Whatever goes wrong on the way costs the explanation, never the error.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable

from .. import plan_store

log = logging.getLogger(__name__)

MOST_BYTES = 2 << 20
"""Packed graphs above this are not sent through the Store (about 100,000 nodes): every rank reads those of one other."""

Explain = Callable[[bytes, bytes, tuple[str, str]], str]
"""(graphs of one rank, of another, the ranks' names) -> what they do not have in common."""


class _Installed:
    explain: Explain | None = None


def install(explain: Explain) -> None:
    _Installed.explain = explain


def packed(digest: str) -> str:
    """The graphs of a plan as text, "" where there are none, or too many."""
    try:
        data = plan_store.load_graphs(digest) if _Installed.explain else None
    except (OSError, ValueError):
        return ""
    return base64.b64encode(data).decode() if data and len(data) <= MOST_BYTES else ""


def told(mine: str, theirs: str, names: tuple[str, str]) -> str:
    """What `packed` graphs of two ranks do not have in common, "" where that cannot be told."""
    explain = _Installed.explain
    if explain is None or not mine or not theirs:
        return ""
    try:
        return explain(base64.b64decode(mine), base64.b64decode(theirs), names)
    except Exception:  # the error that is being made is worth more than this
        log.warning("the graphs of %s and %s cannot be compared", *names, exc_info=True)
        return ""
