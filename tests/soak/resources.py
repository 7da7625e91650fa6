"""Memory, file descriptors and mappings of a process, and the check that they stay flat."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass

ALLOWED_RSS = 8 << 20
"""Bytes of growth of resident memory after the warm-up that count as noise."""
ALLOWED_MAPS = 12
"""malloc maps a few more regions now and then."""
ALLOWED_THREADS = 4
"""The copy engine starts a thread for each collective that is open at once, when that first happens, and keeps it."""
MIN_SAMPLES = 6
"""With fewer, leaks are not looked for."""


@dataclass(frozen=True)
class Resources:
    """What a process holds: resident bytes, open file descriptors, memory mappings, threads."""

    calls: int
    rss: int
    fds: int
    maps: int
    threads: int


def measure_resources(calls: int) -> Resources:
    """Return what this process holds after `calls` calls. Free memory goes back to the system first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps") as file:
        maps = sum(1 for _ in file)
    return Resources(calls, resident, len(os.listdir("/proc/self/fd")), maps, len(os.listdir("/proc/self/task")))


def find_leaks(samples: Sequence[Resources]) -> list[str]:
    """Return what grew from the end of the warm-up, a third of the samples, to the end. Few samples show nothing."""
    if len(samples) < MIN_SAMPLES:
        return []
    window = len(samples) // 6
    before, after = samples[2 * window : 3 * window], samples[-window:]
    found = []
    for name, noise in (("rss", ALLOWED_RSS), ("fds", 0), ("maps", ALLOWED_MAPS), ("threads", ALLOWED_THREADS)):
        # The lowest of the late samples against the highest of the early ones: a peak is no leak.
        first, last = max(getattr(s, name) for s in before), min(getattr(s, name) for s in after)
        if last > first + noise:
            calls = after[0].calls - before[-1].calls
            found.append(f"{name} grew from {first} to {last} in {calls} calls")
    return found
