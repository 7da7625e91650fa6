"""The trace of a step: captured and replayed, or eager between two marks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ub_overlap.tools import trace_events
from ub_overlap.tools.rank_process import World

REPLAYS = 15
"""Replays in a trace, without a pause: clocks and power are those of steady load."""
MARK_CYCLES = 20_000
"""Length of the kernel that marks the begin or the end of an eager step: 10 us."""


def prepare_for_captures() -> None:
    """Start the profiler once. It must have run before the first capture, and its library must stay loaded from then on."""
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    with profile():
        pass


def trace_eager_steps(step: Callable[[], Any], together: Callable[[], Any], world: World) -> list[trace_events.Event]:
    """Return the events of REPLAYS eager steps, each started together and between two marks. All ranks profile; collective."""

    def marked() -> None:
        torch.cuda._sleep(MARK_CYCLES)
        step()
        torch.cuda._sleep(MARK_CYCLES)

    return trace_replays(marked, together, world)


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
