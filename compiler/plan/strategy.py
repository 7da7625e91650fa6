"""How a site runs: one strategy, or several and the rule by which a call picks one.

    pipelined:chunks=4                               one strategy, for all calls
    1536=none;6144=pipelined:chunks=1;*=pipelined    a table: by the rows of the call, up to each limit, "*" any
    pipelined|none                                   alternatives: timed at the first call, the first one until then
    1536=none;*=pipelined|pipelined:chunks=4         both

An op carries this text and C++ reads it (csrc/core/dispatch_table.h). Rows are those of the whole matrix: of what is gathered,
or of the product before it is scattered or reduced. For a collective without a matmul of its own they are all dims but the
last. They are equal on all ranks, and so is the picked strategy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

MAX_CHUNKS = 64
"""Largest number of pieces of a gathered or scattered dim: the flag words of the smallest group, 2 ranks, allow no more."""


class Mode(str, Enum):
    NONE = "none"
    PIPELINED = "pipelined"
    DIRECT = "direct"
    """The matmul of a reduction stores every shard of its product in the memory of the rank that owns it."""
    BULK = "bulk"
    SPLIT = "split"
    """The collective starts and finishes at different places of the graph (docs/explanation/windows.md)."""
    ONE_SHOT = "one_shot"
    """One kernel for few tokens: each rank sends its data to all (docs/explanation/few_tokens.md)."""
    TWO_SHOT = "two_shot"
    """The same for an all_reduce: each rank sums its part, then sends the sum to all."""
    MERGED = "merged"
    """Removed: an all_reduce that was summed into another, or a gather of scales that goes along with their rows."""

    @property
    def is_overlapped(self) -> bool:
        """Whether the collective runs, concurrently with compute or as one kernel with what follows it."""
        return self not in (Mode.NONE, Mode.MERGED)


FUSED = (Mode.ONE_SHOT, Mode.TWO_SHOT)
IN_PIECES = (Mode.PIPELINED, Mode.BULK, Mode.SPLIT)
"""Modes that take `chunks`."""
_REQUESTABLE = tuple(mode.value for mode in Mode if mode is not Mode.MERGED)
STRATEGY_FORMS = (
    f"{', '.join((*_REQUESTABLE, *(f'{mode.value}:chunks=N' for mode in IN_PIECES)))}, pipelined:stripes=N, "
    f"pipelined:copies=engine (gathers; also chunks=N:copies=engine), N from 1 to {MAX_CHUNKS}"
)
"""The texts of one strategy, for errors."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a site runs. `chunks`: pieces over the whole gathered or scattered dimension; 0 means one per rank.

    `striped` (pipelined reductions): every matmul computes one piece of every shard, and chunks counts the pieces of a shard.
    `engine_copies` (pipelined gathers): the driver copies what is kept, concurrently with the matmuls. Never automatic.
    """

    mode: Mode
    chunks: int = 0
    striped: bool = False
    engine_copies: bool = False

    _PATTERN: ClassVar[re.Pattern[str]] = re.compile(
        rf"({'|'.join(_REQUESTABLE)})(?::(chunks|stripes)=([1-9][0-9]{{0,3}}))?(:copies=engine)?\Z"
    )

    def __str__(self) -> str:
        pieces = [f"{'stripes' if self.striped else 'chunks'}={self.chunks}"] if self.chunks else []
        return ":".join([self.mode.value, *pieces, *(["copies=engine"] if self.engine_copies else [])])

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read one of STRATEGY_FORMS. ValueError for others."""
        match = cls._PATTERN.match(text)
        name, what, count, engine = match.groups() if match else (Mode.NONE, "", "0", "")
        mode, striped, wrong = Mode(name), what == "stripes", not match
        wrong |= bool(what) and mode not in IN_PIECES
        wrong |= int(count or 0) > MAX_CHUNKS or (striped and mode is not Mode.PIPELINED)
        wrong |= bool(engine) and (mode is not Mode.PIPELINED or striped)
        if wrong:
            raise ValueError(f"strategy {text!r}: expected {STRATEGY_FORMS}")
        return cls(mode, int(count or 0), striped, bool(engine))

    @classmethod
    def is_forceable(cls, text: str) -> bool:
        """Whether an override may request it, a table included. ("merged" is an outcome, not a choice.)"""
        try:
            parse(text)
        except ValueError:
            return False
        return True

    def at(self, _rows: int) -> Strategy:
        """Return the strategy of a call of `rows` rows: itself."""
        return self

    @property
    def direct(self) -> bool:
        return self.mode is Mode.DIRECT

    @property
    def is_fused(self) -> bool:
        """Whether the collective is one kernel with what follows it."""
        return self.mode in FUSED

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return (self,)


NONE = Strategy(Mode.NONE)


_LIMIT = re.compile(r"[1-9][0-9]{0,17}\Z")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Calls of at most `limit` rows (None: any number). `strategies`: the first is used until one has been measured."""

    limit: int | None
    strategies: tuple[Strategy, ...]

    def __str__(self) -> str:
        return ("*" if self.limit is None else str(self.limit)) + "=" + "|".join(map(str, self.strategies))


@dataclass(frozen=True, slots=True)
class DispatchTable:
    """Several strategies of one site, by rising limit; the last bucket has no limit."""

    buckets: tuple[Bucket, ...]

    def __str__(self) -> str:
        if len(self.buckets) == 1:
            return "|".join(map(str, self.buckets[0].strategies))
        return ";".join(map(str, self.buckets))

    def bucket(self, rows: int) -> Bucket:
        return next(b for b in self.buckets if b.limit is None or rows <= b.limit)

    def at(self, rows: int) -> Strategy:
        """Return the strategy of a call of `rows` rows, until one has been measured."""
        return self.bucket(rows).strategies[0]

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """All strategies, each once."""
        return tuple(dict.fromkeys(s for b in self.buckets for s in b.strategies))

    @property
    def mode(self) -> Mode:
        """The mode of the first overlapped strategy. All are bulk, or all overlap with the collective's own matmuls."""
        return next((s.mode for s in self.strategies if s != NONE), Mode.NONE)

    @property
    def striped(self) -> bool:
        return any(s.striped for s in self.strategies)

    @property
    def engine_copies(self) -> bool:
        return any(s.engine_copies for s in self.strategies)

    @property
    def direct(self) -> bool:
        return any(s.direct for s in self.strategies)

    @property
    def is_fused(self) -> bool:
        """Whether a strategy makes the collective one kernel with what follows it; the others are none then."""
        return any(s.is_fused for s in self.strategies)


def table(buckets: Sequence[Bucket]) -> Strategy | DispatchTable:
    """Return the shortest equivalent form: equal neighbors are merged, and a single strategy is no table."""
    merged: list[Bucket] = []
    for b in buckets:
        if merged and merged[-1].strategies == b.strategies:
            merged.pop()
        merged.append(b)
    if len(merged) == 1 and len(merged[0].strategies) == 1:
        return merged[0].strategies[0]
    return DispatchTable(tuple(merged))


def parse(text: str) -> Strategy | DispatchTable:
    """Read any of the forms above. ValueError says what was expected."""
    if not any(c in text for c in ";|"):
        return Strategy.parse(text)
    buckets: list[Bucket] = []
    for part in text.split(";"):
        limit, equals, names = part.partition("=") if ";" in text else ("*", "=", part)
        if not equals or (limit != "*" and not _LIMIT.match(limit)):
            raise ValueError(f"strategy {text!r}: expected rows=strategy;...;*=strategy, got {part!r}")
        buckets.append(Bucket(None if limit == "*" else int(limit), tuple(map(Strategy.parse, names.split("|")))))
    known = [b.limit for b in buckets if b.limit is not None]
    if buckets[-1].limit is not None or len(known) != len(buckets) - 1 or known != sorted(set(known)):
        raise ValueError(f"strategy {text!r}: expected rising limits, '*' the last")
    if any(len(set(b.strategies)) != len(b.strategies) for b in buckets):
        raise ValueError(f"strategy {text!r}: expected each alternative once")
    found = table(buckets)
    if any(s.mode is Mode.SPLIT for s in found.strategies):
        raise ValueError(f"strategy {text!r}: expected split alone, as it has places in the graph for all calls")
    if len({(s.mode is Mode.BULK, s.is_fused) for s in found.strategies if s != NONE}) > 1:
        raise ValueError(f"strategy {text!r}: expected bulk, or one_shot and two_shot, or others, each with none")
    return found
