"""Host waits for work on this process's own device, each with the step deadline.

They never synchronize the whole device. With pipeline parallelism another stream may wait for a peer that waits for this
rank, and CUDA's own waits have no deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .. import errors, settings
from .wait_limit import WaitLimit


def wait_for_event(description: str, event: Any = None) -> None:
    """Wait until `event` has completed, by default everything issued so far on the current stream.

    `description`: names the work in the error.
    """
    import torch

    if event is None:
        event = torch.cuda.Event()
        event.record()
    wait_until(event.query, description)


def time_on_stream(body: Callable[[], object]) -> float:
    """Return the microseconds between the first and the last work of `body` on the current CUDA stream."""
    import torch

    # The stream must be idle before, because host time counts. Other streams are not waited for: one of them may wait for a
    # peer that waits for this rank.
    wait_for_event("work issued before a timed call")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    body()
    end.record()
    wait_for_event("a timed call", end)
    return float(begin.elapsed_time(end)) * 1e3


def wait_until(is_done: Callable[[], bool], description: str, check: Callable[[], None] | None = None) -> None:
    """Wait until `is_done()`. Raise DeviceTimeoutError after the step deadline. `check`: called while waiting; it may raise."""
    timeout_s, pause = settings.current().step_timeout_s, 0.0
    end = WaitLimit(timeout_s)
    while not is_done():
        if check:
            check()
        if end.is_over():
            raise errors.DeviceTimeoutError(
                f"{description} did not end on this rank's device within {timeout_s:g} s",
                got="work on its stream is still running, or queued behind other work",
                expected="the work ends by itself: waits for peers have deadlines",
                fix=f"look for work issued before it; if that work is only slow, {settings.advise('step_timeout_s')}",
            )
        time.sleep(pause)  # releases the GIL
        pause = min(pause + 2e-5, 1e-3)
