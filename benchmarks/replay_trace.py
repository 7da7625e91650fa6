"""The trace of a captured step, replayed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ub_overlap.tools import trace_events
from ub_overlap.tools.rank_process import World

REPLAYS = 15
"""Replays in a trace, without a pause: clocks and power are those of steady load."""


def prepare_for_captures() -> None:
    """Start the profiler once. It must have run before the first capture, and its library must stay loaded from then on."""
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    with profile():
        pass


def trace_replays(replay: Callable[[], Any], together: Callable[[], Any], world: World) -> list[trace_events.Event]:
    """Return the events of REPLAYS replays of a captured step, each started together. All ranks profile; collective."""
    replay()
    world.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(REPLAYS):
            together()
            replay()
        world.sync()
    with tempfile.TemporaryDirectory(prefix="ub_overlap_waterfall_") as folder:
        path = str(Path(folder) / "trace.json")
        trace.export_chrome_trace(path)
        return trace_events.read_events(path)
