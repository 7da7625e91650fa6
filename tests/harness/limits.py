"""Limits of this process, for tests of what happens at one."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path


def mapped_bytes() -> int:
    """Return the address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Set the soft limit of a resource, such as RLIMIT_AS, and give it back."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """Leave no address space for the 8 MiB stack of another thread. Stacks of threads that have ended are in use meanwhile."""
    done = threading.Event()
    for _ in range(12):
        threading.Thread(target=done.wait, daemon=True).start()
    time.sleep(0.3)
    try:
        with limited(resource.RLIMIT_AS, mapped_bytes() + (5 << 20)):
            yield
    finally:
        done.set()
