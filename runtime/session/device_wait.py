"""Waits of the host for work on its own device, each with the deadline of a step.

Never for the whole device: with pipeline parallelism another stream may wait for a peer who waits for this very rank, and
CUDA's own waits have no deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .. import errors, settings


def ended(what: str, event: Any = None) -> None:
    """Returns once `event` has passed, by default all that has been issued on the current stream so far; `what` names it."""
    import torch

    if event is None:
        event = torch.cuda.Event()
        event.record()
    until(event.query, what)


def until(done: Callable[[], bool], what: str) -> None:
    """Returns once `done`; DeviceTimeoutError where that takes longer than a step may."""
    timeout_s, pause = settings.current().step_timeout_s, 0.0
    end = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > end:
            raise errors.DeviceTimeoutError(
                f"{what} did not end on this rank's device within {timeout_s:g} s",
                got="work on its stream that goes on, or stands behind other work",
                expected="that it ends by itself: waits for peers have deadlines",
                fix="look for what was issued before it; if that only takes long, raise UB_OVERLAP_STEP_TIMEOUT_S",
            )
        time.sleep(pause)  # without the interpreter's lock
        pause = min(pause + 2e-5, 1e-3)
