"""The alternatives of a site, timed once on its ranks: options={"autotune": True}.

    first call of a site (and bucket of sizes)     runs by the first alternative, the model's choice
        tune/N     what each rank knows of equal sites   -> all know the same: that is it
        else       all alternatives in turn, on the inputs of this call: a few rounds to warm up, a few that count
        tuned/N    each rank's median times              -> the least time of the slowest rank; the same pick on every rank

Both exchanges go through the group's Store, with the deadline of a step. What was found is kept in
`<cache>/tuned/<plan digest>.json` by sizes, machine and version, where a later process finds it. Not while a CUDA graph is
captured or warmed up by Inductor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ub_overlap import _torch_compat as compat

from . import errors, machine, plan_store, profile_store, settings
from .extension import extension
from .session import device_wait
from .session.store_exchange import Exchange
from .site_id import SiteId

log = logging.getLogger(__name__)

WARM, TIMED = 3, 5
"""Rounds: on CUDA a call becomes a graph of ours when it is met for the third time, and that is what a training loop runs."""
MARGIN = 0.02
"""What another alternative must save before it takes the place of the model's choice."""
VERSION = 1


@dataclass(frozen=True, slots=True)
class Tuned:
    """`strategy` was picked; `us`: microseconds by strategy, of the slowest rank."""

    strategy: str
    us: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "us": dict(self.us)}

    def __str__(self) -> str:
        return ", ".join(f"{name} {us:.0f}" for name, us in self.us.items()) + f" us measured: {self.strategy}"


@dataclass(slots=True)
class _Known:
    """What this process has measured or read: by site and bucket for reports, by the work's key for equal sites."""

    sites: dict[str, dict[int, Tuned]] = field(default_factory=dict)
    files: dict[Path, dict[str, Tuned]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)


_known = _Known()


def tuned(site: str) -> dict[int, Tuned]:
    """What was picked for a site ("<plan digest>/<site id>"), by number of its bucket of sizes."""
    return dict(_known.sites.get(site, {}))


def forget() -> None:
    """As in a new process."""
    _known.sites.clear()
    _known.files.clear()
    _known.told.clear()


def path_of(digest: str) -> Path:
    """Where the picks of a plan are kept."""
    return plan_store.path_of(digest).parent.parent / "tuned" / f"{digest}.json"


class Tuner:
    """Times alternatives for one group. `exchange` may be None: there is nobody to agree with, and nothing to hide."""

    def __init__(self, exchange: Exchange | None, device: str) -> None:
        self._exchange, self._device = exchange, device
        self._count = 0

    def tune(
        self,
        op: str,
        site: str,
        bucket: int,
        work: str,
        strategies: Sequence[str],
        run: Callable[[int], bool],
        check: Callable[[], None],
    ) -> int:
        """The number of the strategy that all ranks are to use, -1 where this is not the moment to time anything. `run(i)`
        calls the op by strategy i; `check` raises what a peer has come to."""
        exchange = self._exchange
        if exchange is None:
            return 0
        if why := _not_now(self._device):
            if site not in _known.told:
                _known.told.add(site)
                log.info("site '%s' is not tuned while %s: it runs by the predicted %s", site, why, strategies[0])
            return -1
        exchange.op, exchange.site = op, site
        self._count += 1
        file = _File(SiteId.parse(site).digest)
        key = _key(work, strategies, self._device, exchange.ranks)
        found = self._agreed(file.read().get(key), strategies, check)
        if found is None:
            found = self._timed(strategies, run, check)
            file.add(key, found, write=exchange.rank == 0)
            log.info("site '%s', bucket %d: %s", site, bucket, found)
        _known.sites.setdefault(site, {})[bucket] = found
        return list(strategies).index(found.strategy)

    def _all(self, topic: str, mine: dict[str, Any], doing: str, check: Callable[[], None]) -> list[dict[str, Any]]:
        assert self._exchange is not None
        return self._exchange.all(f"{topic}/{self._count}", mine, "step", doing, check)

    def _agreed(self, mine: Tuned | None, strategies: Sequence[str], check: Callable[[], None]) -> Tuned | None:
        """What every rank knows already, if they know the same."""
        card = {"known": mine.to_dict() if mine and mine.strategy in strategies else None, "of": list(strategies)}
        cards = self._all("tune", card, "tune a site", check)
        for rank, their in enumerate(cards):
            if their["of"] != card["of"]:
                raise self._differ(rank, their["of"], card["of"])
        return mine if card["known"] is not None and all(their == card for their in cards) else None

    def _differ(self, rank: int, got: Any, expected: Any) -> errors.SiteMismatchError:
        assert self._exchange is not None
        return errors.SiteMismatchError(
            f"ranks {self._exchange.rank} and {rank} are about to time different sites",
            ranks=(rank,),
            where=f"{self._exchange.op} at site '{self._exchange.site}', group '{self._exchange.group}'",
            got=f"rank {rank}: {got}",
            expected=f"rank {self._exchange.rank}: {expected}",
            fix="give all ranks the same sizes, and capture CUDA graphs on all of them at once",
        )

    def _timed(self, strategies: Sequence[str], run: Callable[[int], bool], check: Callable[[], None]) -> Tuned:
        clock = _cuda_us if self._device == "cuda" else _cpu_us
        times: list[list[float]] = [[] for _ in strategies]
        for turn in range(WARM + TIMED):
            for number in range(len(strategies)):
                us = clock(lambda number=number: _run(run, number))
                if turn >= WARM:
                    times[number].append(us)
        mine = {"us": [round(median(t), 3) for t in times]}
        cards = self._all("tuned", mine, "tell what a site took", check)
        slowest = [max(card["us"][number] for card in cards) for number in range(len(strategies))]
        best = min(range(len(strategies)), key=slowest.__getitem__)
        best = best if slowest[best] < (1 - MARGIN) * slowest[0] else 0
        return Tuned(strategies[best], dict(zip(strategies, slowest, strict=True)))


class _Stopped(RuntimeError):
    """A timed call failed; C++ has its error and raises that."""


def _run(run: Callable[[int], bool], number: int) -> None:
    if not run(number):
        raise _Stopped


def _cpu_us(body: Callable[[], None]) -> float:
    begin = time.perf_counter()
    body()
    return (time.perf_counter() - begin) * 1e6


def _cuda_us(body: Callable[[], None]) -> float:
    """From the first to the last of the call's work on the current stream."""
    import torch

    # The call is timed on a stream that has nothing left to do, as the host's own time counts. What other streams do is theirs:
    # one of them may wait for a peer that waits for this rank.
    device_wait.ended("what was issued before a call that is timed")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    body()
    end.record()
    device_wait.ended("a call that is timed", end)
    return float(begin.elapsed_time(end)) * 1e3


def _not_now(device: str) -> str:
    """Why nothing can be timed at this moment, "" where it can."""
    if device != "cuda":
        return ""
    import torch

    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured"
    return "Inductor warms up a CUDA graph" if compat.warms_up_cuda_graph(torch.cuda.current_device()) else ""


def _key(work: str, strategies: Sequence[str], device: str, ranks: int) -> str:
    # Times are those of this version's executor; on GPUs it is another one where calls that come again are not recorded.
    ours = {"version": extension().build_info()["version"], "replay": settings.current().replay}
    text = json.dumps([work, list(strategies), machine.key(device, ranks), ours], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _File:
    """The picks of one plan on disk, by key, read once a process."""

    def __init__(self, digest: str) -> None:
        try:
            self.path: Path | None = path_of(digest)
        except ValueError:  # a site of no plan: picks live as long as the process
            self.path = None

    def read(self) -> dict[str, Tuned]:
        path = self.path or Path()
        if path not in _known.files:
            _known.files[path] = _load(self.path) if self.path else {}
        return _known.files[path]

    def add(self, key: str, found: Tuned, write: bool) -> None:
        """For this process, and on disk if `write`: beside what other groups have put there meanwhile."""
        self.read()[key] = found
        if not write or self.path is None:
            return
        rows = {name: row.to_dict() for name, row in ({**_load(self.path), key: found}).items()}
        try:
            profile_store.write(self.path, json.dumps({"version": VERSION, "tuned": rows}, indent=1))
        except OSError as error:
            log.warning("%s is not kept, the next process measures again: %s", self.path, error)


def _load(path: Path) -> dict[str, Tuned]:
    """What a file holds; nothing where it is none of ours: it would only save time."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads(path.read_text())
        if found["version"] == VERSION:
            return {
                str(key): Tuned(str(row["strategy"]), {str(k): float(v) for k, v in row["us"].items()})
                for key, row in found["tuned"].items()
            }
    return {}
