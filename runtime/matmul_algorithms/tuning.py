"""A search for the matmuls of one call, in step on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import settings
from ..extension import extension
from ..timed_rounds import fastest, median_us
from . import loading, search
from .search import Device, Problem
from .store import ChosenAlgorithm, Library

log = logging.getLogger(__name__)

Gather = Callable[[dict[str, Any]], Sequence[dict[str, Any]]]
"""Sends a value to all ranks and returns all ranks' values."""


def tune_call(
    device: Device, index: int, library: Library, call: Callable[[], object], gather: Gather, *, write: bool
) -> dict[str, ChosenAlgorithm]:
    """Run `call` and choose the algorithms of its matmuls. Collective. `index`: of the device. `write`: on one rank.

    A matmul that stores at peers is timed in the call, because the links decide. Others are timed by themselves.
    """
    before = device.problems()
    with without_replay():  # a replayed call does not show its matmuls
        call()
        used = search.used_since(before, device.problems())
        chosen = tune(device, index, library, used, gather, write=write)
        at_peers = [problem for problem in used if problem.stores_at_peers and problem.key not in loading.known(index)]
        for_peers = _time_in_calls(device, index, at_peers, call, gather)
    loading.adopt(index, library, for_peers, write=write)
    for row in for_peers.values():
        log.info("algorithm of a matmul: %s in its call", row)
    return chosen | for_peers


def _time_in_calls(
    device: Device, index: int, problems: Sequence[Problem], call: Callable[[], object], gather: Gather
) -> dict[str, ChosenAlgorithm]:
    """Time the call with each proposal for one matmul after the other. None where ranks have different proposals."""
    proposals = [list(dict.fromkeys(device.propose(problem.key, search.PROPOSALS))) for problem in problems]
    own = [[algorithm.hex() for algorithm in row] for row in proposals]
    if any(rank["proposals"] != own for rank in gather({"proposals": own})):
        log.info("the ranks have different proposals for matmuls that store at peers: they keep the first")
        return {}
    chosen: dict[str, ChosenAlgorithm] = {}
    for problem, algorithms in zip(problems, proposals, strict=True):

        def run(number: int, key: str = problem.key, algorithms: Sequence[bytes] = algorithms) -> float:
            extension().add_matmul_algorithms(index, {key: algorithms[number]})
            return device.time_call(call)

        us = median_us(len(algorithms), run, warm=search.WARM, timed=search.TIMED)
        ranks = gather({"key": problem.key, "us": us})
        slowest = [max(us) for us in zip(*(rank["us"] for rank in ranks), strict=True)]
        best = fastest(slowest)
        row = ChosenAlgorithm(algorithms[best], problem.text, slowest[best], slowest[0])
        extension().add_matmul_algorithms(index, {problem.key: row.algorithm})
        chosen |= {str(rank["key"]): row for rank in ranks}
    return chosen


def tune(
    device: Device, index: int, library: Library, problems: Sequence[Problem], gather: Gather, *, write: bool
) -> dict[str, ChosenAlgorithm]:
    """Choose the algorithms of matmuls that have none and store locally, and use them from now on. Collective."""
    local = [problem for problem in problems if not problem.stores_at_peers]
    chosen = search.search(device, local, loading.known(index), gather)
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
