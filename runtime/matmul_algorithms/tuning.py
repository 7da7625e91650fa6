"""A search for the matmuls of one call, in step on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import settings
from ..extension import extension
from . import loading, search
from .search import Device, Problem
from .store import ChosenAlgorithm, Library

log = logging.getLogger(__name__)

Gather = Callable[[dict[str, Any]], Sequence[dict[str, Any]]]
"""Sends a value to all ranks and returns all ranks' values."""


def tune_call(
    device: Device, index: int, library: Library, call: Callable[[], None], gather: Gather, *, write: bool
) -> dict[str, ChosenAlgorithm]:
    """Run `call` once and choose the algorithms of its matmuls. Collective. `index`: of the device. `write`: on one rank."""
    before = device.problems()
    with without_replay():  # a replayed call does not show its matmuls
        call()
    return tune(device, index, library, search.used_since(before, device.problems()), gather, write=write)


def tune(
    device: Device, index: int, library: Library, problems: Sequence[Problem], gather: Gather, *, write: bool
) -> dict[str, ChosenAlgorithm]:
    """Choose the algorithms of those matmuls that have none, and use them from now on. Collective."""
    chosen = search.search(device, problems, loading.known(index), gather)
    loading.adopt(index, library, chosen, write=write)
    for row in chosen.values():
        log.info("algorithm of a matmul: %s", row)
    return chosen


@contextmanager
def without_replay() -> Iterator[None]:
    """Launch calls step by step, also those that are recorded."""
    extension().set_replay(False)
    try:
        yield
    finally:
        extension().set_replay(settings.current().replay)
