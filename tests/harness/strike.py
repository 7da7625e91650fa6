"""Send a rank a signal at a chosen place of the runtime's protocol."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from ub_overlap.runtime.session.store_exchange import Exchange


def signal_before_exchange(topic: str, how: str, prepare: Callable[[], None] = lambda: None) -> None:
    """Send this process the signal `how` when it is about to exchange `topic` with its peers.

    `prepare` runs before. Topics: runtime/session/bind.py and session.py.
    """
    gather_from = Exchange.gather_from

    def strike(self: Any, ranks: Any, current: str, *rest: Any) -> Any:
        if current == topic:
            prepare()
            os.kill(os.getpid(), getattr(signal, how))
        return gather_from(self, ranks, current, *rest)

    Exchange.gather_from = strike  # type: ignore[method-assign]
