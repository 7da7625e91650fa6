"""Measure exposed communication in a profiler trace. Plain Python over Chrome JSON; does not import torch.

Other tools recognize NCCL's kernels by name and count every other kernel as computation. So they count this library's kernels
as compute, and report no overlap. Here the events of a device are:

    communication   NCCL's kernels; ub_overlap's kernels (waits, signals, local copies, reductions); copies to peers
    computation     every other kernel
    exposed         communication with no concurrent compute kernel, in microseconds of wall time

A copy goes to a peer if the profiler says so (PtoP), or if it is a copy within a device (DtoD) on a stream without kernels:
the executor's copy stream has none.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError

from . import trace_events
from .trace_events import Span, minus, total, union

_RANGE = re.compile(r"^ub_overlap::([\w ]+)\[(.+)\]$")


@dataclass(slots=True)
class DeviceTimes:
    """Microseconds of one device over the whole trace.

    `parts`: communication by its carrier. `sites`: exposed time within the profiler ranges of a site's kernels.
    """

    device: str
    span_us: float = 0.0
    compute_us: float = 0.0
    communication_us: float = 0.0
    exposed_us: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    sites: dict[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> float:
        """Share of the communication that was concurrent with computation; 1 without communication."""
        return 1.0 - self.exposed_us / self.communication_us if self.communication_us else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the times as JSON values."""
        times = {k: round(getattr(self, k), 3) for k in ("span_us", "compute_us", "communication_us", "exposed_us", "hidden")}
        rounded = {k: {n: round(us, 3) for n, us in getattr(self, k).items()} for k in ("parts", "sites")}
        return {"device": self.device, **times, **rounded}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {us:.0f}" for name, us in self.parts.items())
        return (
            f"device {self.device}: {self.span_us:.0f} us; computation {self.compute_us:.0f}, communication "
            f"{self.communication_us:.0f} ({parts or 'none'}), exposed {self.exposed_us:.0f}: {self.hidden:.0%} hidden"
        )


def read_trace(path: str | Path) -> list[DeviceTimes]:
    """Read a trace of torch.profiler (export_chrome_trace, also .gz) and return the times by device.

    OptionError for other files, and for a trace without device events. On the CPU an op is a single event; only
    UB_OVERLAP_TRACE=1 shows its steps.
    """
    rows = trace_events.read_events(path)
    try:
        devices = measure_devices(rows)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as e:
        what = f"an event with other fields ({type(e).__name__}: {e})"
        raise OptionError("not a profiler trace", where=str(path), got=what, expected="events with ts, dur and args") from e
    if not devices:
        raise OptionError(
            "the trace has no device events", where=str(path), got="no kernels or copies",
            expected="a trace with ProfilerActivity.CUDA",
            fix="on the CPU: UB_OVERLAP_TRACE=1 and ub_overlap.reports(), which show the hidden bytes",
        )  # fmt: skip
    return devices


def measure_devices(events: Iterable[Mapping[str, Any]]) -> list[DeviceTimes]:
    """Return the times of a trace's devices, by device number."""
    work: dict[str, list[Mapping[str, Any]]] = {}
    ranges: dict[str, list[tuple[str, Span]]] = {}
    for e in events:
        if not isinstance(e, dict) or e.get("ph") != "X":
            continue
        if trace_events.is_device_work(e):
            work.setdefault(trace_events.device_of(e), []).append(e)
        elif e.get("cat") == "gpu_user_annotation" and (match := _RANGE.match(str(e.get("name")))):
            ranges.setdefault(str(e.get("pid")), []).append((match[2], trace_events.span(e)))
    devices = []
    for device, rows in sorted(work.items()):
        pids = {str(e.get("pid")) for e in rows}
        devices.append(_measure_device(device, rows, [r for pid in sorted(pids) for r in ranges.get(pid, [])]))
    return devices


def _measure_device(name: str, rows: Sequence[Mapping[str, Any]], ranges: Sequence[tuple[str, Span]]) -> DeviceTimes:
    with_kernels = trace_events.streams_with_kernels(rows)
    parts: dict[str, list[Span]] = {}
    computing: list[Span] = []
    for e in rows:
        if (kind := _kind(e, with_kernels)) == "compute":
            computing.append(trace_events.span(e))
        elif kind:
            parts.setdefault(kind, []).append(trace_events.span(e))
    busy, moving = union(computing), union(s for spans in parts.values() for s in spans)
    exposed = minus(moving, busy)
    extent = union(map(trace_events.span, rows))
    sites: dict[str, float] = {}
    for site, (begin, end) in ranges:
        first, last = bisect_right(exposed, begin, key=lambda s: s[1]), bisect_left(exposed, end, key=lambda s: s[0])
        inside = sum(min(end, y) - max(begin, x) for x, y in exposed[first:last])
        sites[site] = sites.get(site, 0.0) + inside
    return DeviceTimes(
        device=name,
        span_us=extent[-1][1] - extent[0][0],
        compute_us=total(busy),
        communication_us=total(moving),
        exposed_us=total(exposed),
        parts={kind: total(union(spans)) for kind, spans in sorted(parts.items())},
        sites=dict(sorted(sites.items(), key=lambda item: -item[1])),
    )


def _kind(e: Mapping[str, Any], with_kernels: set[Any]) -> str:
    """Return "compute", the carrier of communication, or "" for neither (copies from and to the host)."""
    name = str(e.get("name"))
    if e["cat"] == "kernel":
        is_ours = trace_events.OURS.search(name)
        return "NCCL" if trace_events.NCCL.match(name) else "ub_overlap kernels" if is_ours else "compute"
    return "copies to peers" if trace_events.is_peer_copy(e, with_kernels) else ""
