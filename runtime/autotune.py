"""Time the alternatives of a site once, on its ranks: options={"autotune": True}.

    first call of a site (and size bucket)         runs the first alternative, the model's choice
        tune/N     each rank's result for equal sites    -> all ranks have the same: use it
        else       all alternatives in turn, on the inputs of this call: WARM rounds, then TIMED rounds
        tuned/N    each rank's median times              -> the least time of the slowest rank; the same on every rank
        algorithms-I/N CUDA: times of several algorithms for each matmul of that strategy (runtime/matmul_algorithms)

All exchanges go through the group's Store, with the step deadline. Results are cached in `<cache>/tuned/<shared digest>.json`,
by sizes, machine and version, for later processes. Nothing is timed while a CUDA graph is captured or warmed up by Inductor.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ub_overlap import _torch_compat as compat

from . import errors, machine, plan_store, settings, stored_file
from .extension import extension
from .session import device_wait
from .session.store_exchange import Exchange
from .site_id import SiteId, shared_digest
from .timed_rounds import fastest, median_us

log = logging.getLogger(__name__)

WARM, TIMED = 3, 5
"""Rounds. On CUDA the third call of an equal kind is recorded as a CUDA graph, which is what a training loop replays."""
VERSION = 1


@dataclass(frozen=True, slots=True)
class TunedStrategy:
    """The fastest strategy of a site. `us`: microseconds by strategy, of the slowest rank."""

    strategy: str
    us: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"strategy": self.strategy, "us": dict(self.us)}

    def __str__(self) -> str:
        return ", ".join(f"{name} {us:.0f}" for name, us in self.us.items()) + f" us measured: {self.strategy}"


@dataclass(slots=True)
class _Results:
    """Results that this process measured or read: by site and bucket for reports, by the work's key for equal sites."""

    sites: dict[str, dict[int, TunedStrategy]] = field(default_factory=dict)
    files: dict[Path, dict[str, TunedStrategy]] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)


_results = _Results()


def tuned_strategies(site: str) -> dict[int, TunedStrategy]:
    """Return the results for a site ("<plan digest>/<site id>"), by number of its size bucket.

    The ranks tune together, so plans with the same shared part have the same results.
    """
    parsed = SiteId.parse(site)
    return dict(_results.sites.get(str(SiteId(shared_digest(parsed.digest), parsed.name)), {}))


def clear_results() -> None:
    """Forget everything measured or read, as in a new process."""
    _results.sites.clear()
    _results.files.clear()
    _results.logged.clear()


def path_of(digest: str) -> Path:
    """Return the file of the results of plans with one shared part."""
    shared = shared_digest(digest)
    return plan_store.path_of(shared).parent.parent / "tuned" / f"{shared}.json"


class Tuner:
    """Times alternatives for one group. `exchange` is None where there are no peers, hence no communication to hide."""

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
        """Return the index of the strategy that all ranks use, -1 where nothing can be timed now.

        `run(i)`: call the op with strategy i. `check`: raises when a peer has failed.
        """
        exchange = self._exchange
        if exchange is None:
            return 0
        if reason := _blocked_by(self._device):
            if site not in _results.logged:
                _results.logged.add(site)
                log.info("site '%s' is not tuned while %s: it runs the predicted %s", site, reason, strategies[0])
            return -1
        exchange.op, exchange.site = op, site
        self._count += 1
        file = _File(SiteId.parse(site).digest)
        key = _key(work, strategies, self._device, exchange.ranks)
        result, keys = self._agree_on_cached(key, file.read().get(key), strategies, check)
        if result is None:
            result = self._measure(strategies, run, check)
            file.add(keys, result, write=exchange.rank == 0)
            if self._device == "cuda":
                self._tune_matmuls(lambda: _run(run, list(strategies).index(result.strategy)), check)
            log.info("site '%s', bucket %d: %s", site, bucket, result)
        _results.sites.setdefault(site, {})[bucket] = result
        return list(strategies).index(result.strategy)

    def _gather(self, topic: str, own: dict[str, Any], doing: str, check: Callable[[], None]) -> list[dict[str, Any]]:
        assert self._exchange is not None
        return self._exchange.gather(f"{topic}/{self._count}", own, "step", doing, check)

    def _agree_on_cached(
        self, key: str, cached: TunedStrategy | None, strategies: Sequence[str], check: Callable[[], None]
    ) -> tuple[TunedStrategy | None, set[str]]:
        """Return the cached result if every rank has the same one, else None; and the keys of all ranks.

        Keys differ where a rank adds something of its own to the sum that is reduced.
        """
        known = cached.to_dict() if cached and cached.strategy in strategies else None
        own = {"known": known, "of": list(strategies), "key": key}
        ranks = self._gather("tune", own, "tune a site", check)
        for rank, other in enumerate(ranks):
            if other["of"] != own["of"]:
                raise self._site_mismatch(rank, other["of"], own["of"])
        is_common = known is not None and all(other["known"] == known for other in ranks)
        return cached if is_common else None, {str(other["key"]) for other in ranks}

    def _site_mismatch(self, rank: int, got: Any, expected: Any) -> errors.SiteMismatchError:
        assert self._exchange is not None
        number = self._exchange.numbers[rank]
        return errors.SiteMismatchError(
            f"ranks {self._exchange.number} and {number} are about to time different sites",
            ranks=(number,),
            where=f"{self._exchange.op} at site '{self._exchange.site}', {self._exchange.label}",
            got=f"rank {number}: {got}",
            expected=f"rank {self._exchange.number}: {expected}",
            fix="give all ranks the same sizes, and capture CUDA graphs on all of them at once",
        )

    def _measure(self, strategies: Sequence[str], run: Callable[[int], bool], check: Callable[[], None]) -> TunedStrategy:
        """Time every strategy on all ranks and return the one with the least time on its slowest rank."""
        measure_us = device_wait.time_on_stream if self._device == "cuda" else _cpu_us
        us = median_us(len(strategies), lambda index: measure_us(lambda: _run(run, index)), warm=WARM, timed=TIMED)
        own = {"us": us}
        ranks = self._gather("tuned", own, "the exchange of a site's times", check)
        slowest = [max(rank["us"][index] for rank in ranks) for index in range(len(strategies))]
        return TunedStrategy(strategies[fastest(slowest)], dict(zip(strategies, slowest, strict=True)))

    def _tune_matmuls(self, call: Callable[[], None], check: Callable[[], None]) -> None:
        from .matmul_algorithms import gpu, tuning

        rounds = itertools.count()

        def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
            return self._gather(f"algorithms-{next(rounds)}", own, "the exchange of the times of a site's matmuls", check)

        assert self._exchange is not None
        device = gpu.MatmulGpu()
        tuning.tune_call(device, device.device, device.library(), call, gather, write=self._exchange.rank == 0)


class _TimedCallFailed(RuntimeError):
    """A timed call failed. C++ holds its error and raises that."""


def _run(run: Callable[[int], bool], index: int) -> None:
    if not run(index):
        raise _TimedCallFailed


def _cpu_us(body: Callable[[], None]) -> float:
    begin = time.perf_counter()
    body()
    return (time.perf_counter() - begin) * 1e6


def _blocked_by(device: str) -> str:
    """Return why nothing can be timed now, "" where it can."""
    if device != "cuda":
        return ""
    import torch

    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured"
    return "Inductor warms up a CUDA graph" if compat.warms_up_cuda_graph(torch.cuda.current_device()) else ""


def _key(work: str, strategies: Sequence[str], device: str, ranks: int) -> str:
    # Times belong to this version's executor. On GPUs they also depend on whether repeated calls are replayed as CUDA graphs.
    build = {"version": extension().build_info()["version"], "replay": settings.current().replay}
    text = json.dumps([work, list(strategies), machine.key(device, ranks), build], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _File:
    """The results of one plan on disk, by key, read once per process."""

    def __init__(self, digest: str) -> None:
        try:
            self.path: Path | None = path_of(digest)
        except (ValueError, OSError):  # a site without a plan, or no folder: results last as long as the process
            self.path = None

    def read(self) -> dict[str, TunedStrategy]:
        """Return the results by key."""
        path = self.path or Path()
        if path not in _results.files:
            _results.files[path] = _load(self.path) if self.path else {}
        return _results.files[path]

    def add(self, keys: Iterable[str], result: TunedStrategy, write: bool) -> None:
        """Add a result for this process, and on disk if `write`, keeping what other groups wrote since."""
        added = dict.fromkeys(sorted(keys), result)
        self.read().update(added)
        if not write or self.path is None:
            return
        rows = {name: row.to_dict() for name, row in ({**_load(self.path), **added}).items()}
        try:
            stored_file.write(self.path, json.dumps({"version": VERSION, "tuned": rows}, indent=1))
        except OSError as error:
            log.warning("cannot write %s, the next process measures again: %s", self.path, error)


def _load(path: Path) -> dict[str, TunedStrategy]:
    """Return the results in a file, none where it is unreadable: they only save time."""
    if not os.path.isfile(path):  # to open a FIFO would block for ever
        return {}
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
        content = stored_file.read_json(path)
        if content["version"] == VERSION:
            return {
                str(key): TunedStrategy(str(row["strategy"]), {str(k): float(v) for k, v in row["us"].items()})
                for key, row in content["tuned"].items()
            }
    return {}
