"""Device events of a profiler trace (Chrome JSON of torch.profiler), and arithmetic of time spans. Does not import torch."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError

NCCL = re.compile(r"^(nccl|rccl|mscclKernel)", re.IGNORECASE)
OURS = re.compile(r"\bub_overlap::")
Event = Mapping[str, Any]
Span = tuple[float, float]
MAX_BYTES = 8 << 30
"""The largest trace that is read, decompressed."""


def read_events(path: str | Path) -> list[Event]:
    """Return the events of a trace of torch.profiler (export_chrome_trace, also .gz). OptionError for other files."""
    try:
        content = json.loads(_read_bounded(path))
    except FileNotFoundError:
        raise OptionError("file not found", where=str(path), expected="Chrome JSON of torch.profiler") from None
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as e:  # EOFError: a truncated .gz
        raise OptionError("not a profiler trace", where=str(path), got=str(e), expected="Chrome JSON of torch.profiler") from e
    rows = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise OptionError("not a profiler trace", where=str(path), got="other JSON", expected="a list traceEvents")
    return rows


def _read_bounded(path: str | Path) -> bytes:
    """The content of a file, decompressed. ValueError if it is more than MAX_BYTES."""
    with open(path, "rb") as f:
        is_compressed = f.read(2) == b"\x1f\x8b"
        f.seek(0)
        content: Any = gzip.GzipFile(fileobj=f) if is_compressed else f
        data = content.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES >> 30} GiB")
    return bytes(data)


def is_device_work(e: Any) -> bool:
    """Return whether an event is a kernel, a copy or a memset of a device."""
    return isinstance(e, dict) and e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def device_of(e: Event) -> str:
    return str((e.get("args") or {}).get("device", e.get("pid")))


def stream_of(e: Event) -> Any:
    return (e.get("args") or {}).get("stream", e.get("tid"))


def streams_with_kernels(events: Iterable[Event]) -> set[Any]:
    return {stream_of(e) for e in events if e["cat"] == "kernel"}


def is_peer_copy(e: Event, with_kernels: set[Any]) -> bool:
    """Return whether a copy goes to a peer: by its name, or as a copy within a device on a stream without kernels."""
    name = str(e.get("name"))
    return e["cat"] == "gpu_memcpy" and ("PtoP" in name or ("DtoD" in name and stream_of(e) not in with_kernels))


def span(e: Event) -> Span:
    begin = float(e["ts"])
    return begin, begin + float(e.get("dur", 0.0))


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans into ordered spans without overlaps."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def minus(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """Return the times in `a` but not in `b`, both results of `union`."""
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
    """Return the sum of the lengths."""
    return sum(end - begin for begin, end in spans)
