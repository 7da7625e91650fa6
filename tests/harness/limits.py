"""Limits of this process, for tests of what happens at one."""

from __future__ import annotations

import contextlib
import resource
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
