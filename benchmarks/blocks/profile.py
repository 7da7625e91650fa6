"""Profile of a step as text: kernels by time, and the order of one step."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ub_overlap.tools.rank_process import World

from .variants import BlockVariant

STEPS = 3


def write_profile(variant: BlockVariant, world: World, folder: str, title: str) -> str:
    """Run STEPS steps on all ranks; rank 0 writes its profile to FOLDER/TITLE.txt. Return a message."""
    if world.rank:
        for _ in range(STEPS):
            variant.step()
        world.sync()
        return ""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.cuda else [])]
    with profile(activities=activities) as trace:
        for _ in range(STEPS):
            variant.step()
        world.sync()
    events: list[Any] = sorted(
        (e for e in trace.events() if not world.cuda or "CUDA" in str(e.device_type)), key=lambda e: e.time_range.start
    )
    path = Path(folder) / f"{title}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{title}, {STEPS} steps\n\n{by_time(events)}\n\n{in_order(events)}\n")
    return f"{path}: {len(events)} events"


def by_time(events: list[Any], limit: int = 60) -> str:
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name].append(event.time_range.end - event.time_range.start)
    rows = sorted(times.items(), key=lambda item: -sum(item[1]))[:limit]
    lines = [f"{sum(t) / STEPS:10.1f} us per step {len(t) / STEPS:7.1f} x  {name[:110]}" for name, t in rows]
    return "\n".join(["by time", *lines])


def in_order(events: list[Any]) -> str:
    """Return the last step: start, length, stream, name."""
    last = events[len(events) * (STEPS - 1) // STEPS :]
    if not last:
        return "no events"
    begin = last[0].time_range.start
    lines = []
    for event in last[:4000]:
        start, length = event.time_range.start - begin, event.time_range.end - event.time_range.start
        stream = getattr(event, "device_resource_id", "?")
        lines.append(f"{start:10.1f} +{length:8.1f} us  stream {stream!s:>4}  {event.name[:110]}")
    return "\n".join(["in order, one step", *lines])
