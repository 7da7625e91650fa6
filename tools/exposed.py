"""How much communication a profiler trace shows with nothing beside it. Plain Python over Chrome JSON; imports no torch.

Other tools know NCCL's kernels by name and take every other kernel for computation, so ours count as compute and overlap as 0.
Here, of a device's events:

    communication   NCCL's kernels; our kernels (waits, signals, local copies, reductions); copies to peers
    computation     every other kernel
    exposed         communication while no computation runs, in microseconds of wall time

A copy is one to a peer where the profiler says so (PtoP), or where it is a device's own copy (DtoD) on a stream that runs
no kernels: the executor's copy stream holds none.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError

_NCCL = re.compile(r"^(nccl|rccl|mscclKernel)", re.IGNORECASE)
_OURS = re.compile(r"\bub_overlap::")
_RANGE = re.compile(r"^ub_overlap::([\w ]+)\[(.+)\]$")
Span = tuple[float, float]


@dataclass(slots=True)
class Device:
    """Microseconds of one device over the whole trace. `parts`: communication by what carries it; `sites`: exposed time in the
    ranges that kernels of a site are put under."""

    device: str
    span_us: float = 0.0
    compute_us: float = 0.0
    communication_us: float = 0.0
    exposed_us: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    sites: dict[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> float:
        """Share of the communication that ran beside computation; 1 where there was none."""
        return 1.0 - self.exposed_us / self.communication_us if self.communication_us else 1.0

    def to_dict(self) -> dict[str, Any]:
        times = {k: round(getattr(self, k), 3) for k in ("span_us", "compute_us", "communication_us", "exposed_us", "hidden")}
        rounded = {k: {n: round(us, 3) for n, us in getattr(self, k).items()} for k in ("parts", "sites")}
        return {"device": self.device, **times, **rounded}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {us:.0f}" for name, us in self.parts.items())
        return (
            f"device {self.device}: {self.span_us:.0f} us; computation {self.compute_us:.0f}, communication "
            f"{self.communication_us:.0f} ({parts or 'none'}), exposed {self.exposed_us:.0f}: {self.hidden:.0%} hidden"
        )


def read(path: str | Path) -> list[Device]:
    """A trace of torch.profiler (export_chrome_trace; .gz too), device by device. OptionError for what is none, and for a trace
    without a device: on the CPU our ops are single events, whose insides only UB_OVERLAP_TRACE=1 tells."""
    try:
        raw = Path(path).read_bytes()
        found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, ValueError) as e:
        raise OptionError("this is no trace", where=str(path), got=str(e), expected="Chrome JSON of torch.profiler") from e
    rows = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise OptionError("this is no trace", where=str(path), got="other JSON", expected="a list traceEvents")
    devices = exposed(rows)
    if not devices:
        raise OptionError(
            "the trace shows no device", where=str(path), got="no events of kernels or copies",
            expected="a trace with ProfilerActivity.CUDA",
            fix="on the CPU: UB_OVERLAP_TRACE=1 and ub_overlap.reports(), which tell the bytes that were hidden",
        )  # fmt: skip
    return devices


def exposed(events: Iterable[Mapping[str, Any]]) -> list[Device]:
    """The devices of a trace, by number."""
    work: dict[str, list[Mapping[str, Any]]] = {}
    ranges: dict[str, list[tuple[str, Span]]] = {}
    for e in events:
        if not isinstance(e, dict) or e.get("ph") != "X":
            continue
        category, device = e.get("cat"), str((e.get("args") or {}).get("device", e.get("pid")))
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.setdefault(device, []).append(e)
        elif category == "gpu_user_annotation" and (named := _RANGE.match(str(e.get("name")))):
            ranges.setdefault(str(e.get("pid")), []).append((named[2], _span(e)))
    found = []
    for device, rows in sorted(work.items()):
        pids = {str(e.get("pid")) for e in rows}
        found.append(_device(device, rows, [r for pid in sorted(pids) for r in ranges.get(pid, [])]))
    return found


def _device(name: str, rows: Sequence[Mapping[str, Any]], ranges: Sequence[tuple[str, Span]]) -> Device:
    with_kernels = {_stream(e) for e in rows if e["cat"] == "kernel"}
    parts: dict[str, list[Span]] = {}
    computing: list[Span] = []
    for e in rows:
        if (kind := _kind(e, with_kernels)) == "compute":
            computing.append(_span(e))
        elif kind:
            parts.setdefault(kind, []).append(_span(e))
    busy, moving = union(computing), union(s for spans in parts.values() for s in spans)
    open_ = minus(moving, busy)
    everything = union(map(_span, rows))
    sites: dict[str, float] = {}
    for site, (begin, end) in ranges:
        first, last = bisect_right(open_, begin, key=lambda s: s[1]), bisect_left(open_, end, key=lambda s: s[0])
        inside = sum(min(end, y) - max(begin, x) for x, y in open_[first:last])
        sites[site] = sites.get(site, 0.0) + inside
    return Device(
        device=name,
        span_us=everything[-1][1] - everything[0][0],
        compute_us=total(busy),
        communication_us=total(moving),
        exposed_us=total(open_),
        parts={kind: total(union(spans)) for kind, spans in sorted(parts.items())},
        sites=dict(sorted(sites.items(), key=lambda item: -item[1])),
    )


def _kind(e: Mapping[str, Any], with_kernels: set[Any]) -> str:
    """ "compute", what carries communication, or "" for what is neither (copies from and to the host)."""
    name = str(e.get("name"))
    if e["cat"] == "kernel":
        return "NCCL" if _NCCL.match(name) else "ub_overlap kernels" if _OURS.search(name) else "compute"
    if "PtoP" in name or ("DtoD" in name and _stream(e) not in with_kernels):
        return "copies to peers"
    return ""


def _stream(e: Mapping[str, Any]) -> Any:
    return (e.get("args") or {}).get("stream", e.get("tid"))


def _span(e: Mapping[str, Any]) -> Span:
    begin = float(e["ts"])
    return begin, begin + float(e.get("dur", 0.0))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times, without overlaps, in order."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def minus(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """The times of `a` that are none of `b`; both as `union` gives them."""
    out, k = [], 0
    for begin, end in a:
        while k < len(b) and b[k][1] <= begin:
            k += 1
        at, j = begin, k
        while j < len(b) and b[j][0] < end:
            if b[j][0] > at:
                out.append((at, b[j][0]))
            at = max(at, b[j][1])
            j += 1
        if at < end:
            out.append((at, end))
    return out


def total(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
