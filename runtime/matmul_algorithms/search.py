"""The search for the fastest algorithms: times of one rank, and the choice from the times of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

from ..timed_rounds import fastest, median_us
from .store import ChosenAlgorithm

log = logging.getLogger(__name__)

PROPOSALS = 16
"""Algorithms of a matmul that are timed."""
WARM, TIMED = 2, 9
"""Rounds."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A matmul that has run. `key`: everything that the library's choice depends on. `uses`: its launches so far."""

    key: str
    text: str
    uses: int
    stores_at_peers: bool = False
    """In use its results lie in other ranks' memory, so it is timed in its call."""
    buffers: tuple[tuple[str, str, int, int], ...] = ()
    """(name, dtype, bytes, alignment)."""


class Device(Protocol):
    """What the search needs of a device."""

    def problems(self) -> list[Problem]: ...
    def propose(self, key: str, count: int) -> list[bytes]: ...
    def time_call(self, call: Callable[[], object]) -> float: ...
    def prepare(self, problem: Problem, algorithms: Sequence[bytes]) -> Callable[[int], float]:
        """Return a function that runs algorithm i once and returns its microseconds, infinity if it must not be used."""


Times = dict[str, list[list[Any]]]
"""Key of a matmul -> [algorithm in hexadecimal digits, microseconds], the first proposal first. As JSON."""


def used_since(before: Sequence[Problem], after: Sequence[Problem]) -> list[Problem]:
    """Return the problems of `after` that were launched since `before`."""
    uses = {problem.key: problem.uses for problem in before}
    return [problem for problem in after if problem.uses > uses.get(problem.key, 0)]


def measure(device: Device, problems: Sequence[Problem]) -> Times:
    """Return this rank's median times. A problem that cannot be timed, e.g. for lack of memory, has none."""
    return {problem.key: _measure_one(device, problem) for problem in problems}


def _measure_one(device: Device, problem: Problem) -> list[list[Any]]:
    try:
        algorithms = list(dict.fromkeys(device.propose(problem.key, PROPOSALS)))
        run = device.prepare(problem, algorithms)
        medians = median_us(len(algorithms), run, warm=WARM, timed=TIMED)
    except Exception as error:  # noqa: BLE001  the peers wait for this rank's times, and the first proposal works
        log.warning("cannot time the algorithms of the matmul %s: %s", problem.text, error)
        return []
    return [[algorithm.hex(), us] for algorithm, us in zip(algorithms, medians, strict=True) if isfinite(us)]


def choose(ranks: Sequence[Times], texts: Mapping[str, str]) -> dict[str, ChosenAlgorithm]:
    """Return the algorithm of each key, the same on every rank: the least time of the slowest rank that has the key.

    Shapes may differ between ranks, where rows are dealt out unevenly. Only algorithms that all ranks with the key have timed
    count. Without any there is no choice, and the library's first proposal stays.
    """
    chosen = {}
    for key in sorted({key for times in ranks for key in times}):
        rows = [{str(algorithm): float(us) for algorithm, us in times[key]} for times in ranks if key in times]
        slowest = {a: max(row[a] for row in rows) for a in rows[0] if all(a in row for row in rows)}
        if not slowest:
            continue
        algorithms, us = list(slowest), list(slowest.values())
        best = fastest(us)
        text = texts.get(key, "a matmul of another rank")
        chosen[key] = ChosenAlgorithm(bytes.fromhex(algorithms[best]), text, us[best], us[0])
    return chosen


def search(
    device: Device,
    problems: Sequence[Problem],
    known: Collection[str],
    gather: Callable[[dict[str, Any]], Sequence[dict[str, Any]]],
) -> dict[str, ChosenAlgorithm]:
    """Time the problems that are not `known` and return the choices of all ranks. Collective, by one `gather`."""
    new = [problem for problem in problems if problem.key not in known]
    own = {"times": measure(device, new), "texts": {problem.key: problem.text for problem in new}}
    ranks = gather(own)
    texts = {str(key): str(text) for rank in ranks for key, text in rank["texts"].items()}
    return choose([rank["times"] for rank in ranks], texts)
