"""A rank's schedule as the executor issues it: items on two queues, each with the key of its cost.

Same order as csrc/cuda/executor.cpp: one kernel begins the call and waits for all free slots. Neighboring waits are one kernel,
neighboring local copies one launch. The last kernel signals the peers that the slot was read.

Costs are looked up by `CostItem`, which holds shares of a shard and no sizes: one program serves every shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from ub_overlap.runtime.schedule.builders import build
from ub_overlap.runtime.schedule.effects import show, signals, waits
from ub_overlap.runtime.schedule.steps import (
    Buf,
    Compute,
    Copy,
    Finish,
    Flag,
    FlagKind,
    Key,
    Opaque,
    Queue,
    Reduce,
    Region,
    Schedule,
    Signal,
    Step,
    Wait,
)


@dataclass(frozen=True, slots=True)
class CostItem:
    """`what`: "begin", "end", "matmul", "direct" (a matmul that stores its product at peers), "push", "flag", "copy", "reduce",
    "finish", "wait", "signal" or "opaque".

    `share`: shards it covers (matmul: of its product; a contraction: of what it reads). `index`: consumer or term of a
    matmul, independent matmuls behind them. `pieces`: separate blocks of a matmul; sources of a reduction. `adds`:
    accumulates into its output. `peer`: ranks from this rank to the target of a push. `us`: of an opaque step.
    `of_sum`: it moves reduced elements, which may be wider than the summands.
    """

    what: str
    share: float = 0.0
    index: int = 0
    pieces: int = 1
    adds: bool = False
    peer: int = 0
    us: float = 0.0
    of_sum: bool = False


FlagName = tuple[FlagKind, int, int]
"""A flag by kind, distance in ranks from its writer to its owner, and index: the same word under rotation."""


@dataclass(frozen=True, slots=True)
class QueueItem:
    """One step of a queue. `after`: items that must have ended. `waits` and `signals`: flags, relative to this rank."""

    copies: bool
    work: CostItem
    after: tuple[int, ...] = ()
    waits: tuple[FlagName, ...] = ()
    signals: tuple[FlagName, ...] = ()
    text: str = field(default="", compare=False)


@lru_cache(maxsize=512)
def programs(key: Key) -> tuple[tuple[QueueItem, ...], ...]:
    """Return one program per rank; a single one where all ranks do the same up to rotation."""
    first = _program(build(key, 0))
    if key.chunks % key.ranks == 0:  # all ranks cut alike
        return (first,)
    made = [first, *(_program(build(key, rank)) for rank in range(1, key.ranks))]
    return (first,) if len(set(made)) == 1 else tuple(made)


def _program(schedule: Schedule) -> tuple[QueueItem, ...]:
    rank, ranks = schedule.rank, schedule.key.ranks
    items: list[QueueItem] = [QueueItem(False, CostItem("begin"), text="begin")]
    known: dict[CostItem, CostItem] = {}  # equal items are one object, so that a cost is looked up by identity
    events: dict[int, int] = {}
    ended: dict[int, tuple[Region, Region]] = {}  # local copies by item, which a neighbor may join
    copying = False

    def name(flag: Flag) -> FlagName:
        return (flag.kind, (flag.rank - flag.source) % ranks, flag.index)

    for step in schedule.steps:
        after = tuple(events[event] for event in step.after)
        copies = step.queue is Queue.COPY
        if isinstance(step, Wait) and step.back:
            continue  # done by the call's first kernel
        if isinstance(step, Signal) and not copies and step.flag.kind is FlagKind.DONE:
            if items[-1].work.what != "end":
                items.append(QueueItem(False, CostItem("end"), after, text="end"))
            continue
        if copies and not copying:
            copying, after = True, (*after, 0)
        last, before = items[-1], ended.get(len(items) - 1)
        if isinstance(step, Wait) and not copies and last.work.what == "wait" and not last.copies and not after:
            items[-1] = replace(last, waits=(*last.waits, name(step.flag)), text=f"{last.text}, {show(step)}")
        elif isinstance(step, Copy) and not copies and before and not after and _joins(before, step):
            work = replace(last.work, share=last.work.share + _share(step.src))
            items[-1] = replace(last, work=known.setdefault(work, work), text=f"{last.text}, {show(step)}")
            ended[len(items) - 1] = (step.src, step.dst)
        else:
            work = _work(step, rank, schedule.key)
            awaited = tuple(name(w.flag) for w in waits(step) if not w.back)
            signalled = tuple(map(name, signals(step)))
            items.append(QueueItem(copies, known.setdefault(work, work), after, awaited, signalled, show(step)))
            if isinstance(step, Copy) and not copies:
                ended[len(items) - 1] = (step.src, step.dst)
        if step.record is not None:
            events[step.record] = len(items) - 1
    return tuple(items)


def _work(step: Step, rank: int, key: Key) -> CostItem:
    match step:
        case Copy():
            of_sum = step.src.buf in (Buf.OUTPUT, Buf.LANDING2)
            if step.dst.rank == rank:
                return CostItem("copy", _share(step.src), of_sum=of_sum)
            return CostItem("push", _share(step.src), peer=(step.dst.rank - rank) % key.ranks, of_sum=of_sum)
        case Signal():
            return CostItem("flag" if step.queue is Queue.COPY else "signal")
        case Wait():
            return CostItem("wait")
        case Compute():
            if key.is_independent(step):  # never cut: its one write is its whole result
                return CostItem("matmul", float(key.ranks), key.terms + step.index)
            contracts = bool(key.contracts) and key.contracts[step.index]
            parts = step.reads if contracts else step.writes
            share = sum(map(_share, parts))
            if key.direct:
                return CostItem("direct", share, step.index)
            pieces = len(step.writes) if key.striped else 1
            return CostItem("matmul", share, step.index, pieces, step.accumulate)
        case Reduce():
            return CostItem("reduce", _share(step.dst), pieces=len(step.srcs))
        case Finish():
            return CostItem("finish", index=step.index)
        case Opaque():
            return CostItem("opaque", us=step.cost_us)
    raise TypeError(f"no cost for {show(step)}")


def _share(region: Region) -> float:
    return float(region.hi - region.lo)


def _joins(before: tuple[Region, Region], step: Copy) -> bool:
    """Return whether a local copy continues the one before in source and destination, so that both are one launch."""
    for old, new in zip(before, (step.src, step.dst), strict=True):
        along = (old.shard == new.shard and old.hi == new.lo) or (old.shard + 1 == new.shard and old.hi == 1 and new.lo == 0)
        if old.buf is not new.buf or not along:
            return False
    return True
