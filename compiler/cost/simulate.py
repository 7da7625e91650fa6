"""Discrete-event simulation of programs: two queues per rank, events, flags, and contention.

A rank's compute queue and copy queue run concurrently. While bytes move in or out of a rank its matmul runs slower; while a
matmul runs its pushes run slower; and concurrent pushes to one rank share its port. A matmul that stores at its peers uses the
same ports: as one push, spread over all peers. Flags are the only synchronization between
ranks. Where all ranks do the same, one is simulated and its peers are assumed to be exactly as far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .program import CostItem, FlagName, QueueItem

SHARE = 0.7
"""n pushes to one rank at a time run at n ** -SHARE of their speed each: one copy engine alone does not fill a port."""


@dataclass(frozen=True, slots=True)
class Contention:
    """Slowdowns as factors of at least 1, and the latencies of synchronization."""

    matmul: float
    push: float
    event_us: float
    wait_us: float
    arrive_us: float


Times = list[tuple[float, float]]
"""(begin, end) of every item, in microseconds from the begin of the call."""


def play(programs: Sequence[Sequence[QueueItem]], cost: Callable[[CostItem], float], contention: Contention) -> list[Times]:
    """Return the times of every item of every program. ValueError if they wait for each other in a cycle."""
    return _Game(programs, cost, contention).run()


def busy_us(program: Sequence[QueueItem], times: Times, contention: Contention) -> float:
    """Return the microseconds for which the compute queue of a rank is busy: those of its items, less their waiting."""
    total = 0.0
    for item, (begin, end) in zip(program, times, strict=True):
        if item.copies:
            continue
        if item.work.what == "wait":
            total += min(contention.wait_us, contention.arrive_us)
        else:
            total += end - begin - (contention.arrive_us if item.waits else 0.0)
    return total


class _Game:
    """Queue q is the compute queue (even) or the copy queue (odd) of rank q // 2."""

    def __init__(
        self, programs: Sequence[Sequence[QueueItem]], cost: Callable[[CostItem], float], contention: Contention
    ) -> None:
        self.programs, self.cost, self.with_ = programs, cost, contention
        self.ranks = len(programs)
        self.matmul_speed = 1 / contention.matmul
        queues = 2 * self.ranks
        self.lists = [[i for i, x in enumerate(programs[q // 2]) if x.copies == bool(q % 2)] for q in range(queues)]
        self.head = [0] * queues
        self.running = [-1] * queues  # the item that runs, -1 for none
        self.blocked: list[float | None] = [None] * queues  # since when the head item waits
        self.left = [0.0] * queues
        self.speed = [1.0] * queues
        self.since = [0.0] * queues
        self.ends = [math.inf] * queues
        self.times: list[Times] = [[(0.0, math.inf)] * len(p) for p in programs]
        self.flags: set[tuple[int, FlagName]] = set()
        self.moves = [0] * self.ranks  # pushes that arrive at a rank now
        self.stores = [0] * self.ranks  # matmuls of peers that store at a rank now
        self.target = [-1] * self.ranks  # the target of a rank's current push

    def run(self) -> list[Times]:
        for q in range(len(self.lists)):
            if self.lists[q]:
                self.start(q, 0.0)
        ends = self.ends
        while True:
            now = min(ends)
            if now == math.inf:
                break
            self.finish(ends.index(now), now)
        stuck = [self.programs[q // 2][x[self.head[q]]].text for q, x in enumerate(self.lists) if self.head[q] < len(x)]
        if stuck:
            raise ValueError(f"these steps wait for each other: {'; '.join(stuck)}")
        return self.times

    def start(self, q: int, now: float) -> None:
        """Begin the next item of an idle queue if it waits for nothing."""
        rank, place = q // 2, self.lists[q][self.head[q]]
        item, times = self.programs[rank][place], self.times[rank]
        latency = 0.0
        for before in item.after:
            if times[before][1] > now:
                break
            if self.programs[rank][before].copies != item.copies:
                latency = self.with_.event_us
        else:
            for flag in item.waits:
                if (rank, flag) not in self.flags:
                    break
            else:
                self.begin(q, rank, place, item, now, latency)
                return
        if self.blocked[q] is None:
            self.blocked[q] = now

    def begin(self, q: int, rank: int, place: int, item: QueueItem, now: float, latency: float) -> None:
        what, begun, since = item.work.what, now, self.blocked[q]
        if what == "wait":
            us = self.with_.wait_us
            if since is not None:
                begun, us = since, max(self.with_.arrive_us, us - (now - since))
        else:
            us = self.cost(item.work) + (self.with_.arrive_us if item.waits and since is not None else 0.0)
        self.blocked[q] = None
        self.running[q] = place
        self.times[rank][place] = (begun, math.inf)
        self.left[q], self.since[q], self.speed[q] = us + latency, now, 1.0
        self.ends[q] = now + us + latency
        if what == "push":
            target = (rank + item.work.peer) % self.ranks
            self.target[rank] = target
            self.moves[target] += 1
            self.traffic(target, rank, now)
        elif what == "direct":
            self.store(rank, 1, now)
        elif what == "matmul":
            self.rate(rank, now)

    def finish(self, q: int, now: float) -> None:
        rank, place = q // 2, self.running[q]
        item, times = self.programs[rank][place], self.times[rank]
        times[place] = (times[place][0], now)
        self.running[q], self.ends[q] = -1, math.inf
        self.head[q] += 1
        what = item.work.what
        if what == "push":
            target, self.target[rank] = self.target[rank], -1
            self.moves[target] -= 1
            self.traffic(target, rank, now)
        elif what == "direct":
            self.store(rank, -1, now)
        elif what == "matmul":
            self.rate(rank, now)
        woken = [rank]
        for flag in item.signals:
            there = (rank + flag[1]) % self.ranks
            self.flags.add((there, flag))
            if there not in woken:
                woken.append(there)
        for other in woken if len(woken) == 1 else sorted(woken):
            for idle in (2 * other, 2 * other + 1):
                if self.running[idle] < 0 and self.head[idle] < len(self.lists[idle]):
                    self.start(idle, now)

    def traffic(self, target: int, source: int, now: float) -> None:
        """Update speeds after a push from `source` to `target` began or ended: both matmuls and all pushes to `target`."""
        if self.ranks == 1:
            self.rate(0, now)
            return
        for rank in range(self.ranks):
            if rank in (target, source) or self.target[rank] == target:
                self.rate(rank, now)

    def store(self, source: int, count: int, now: float) -> None:
        """Update speeds after a matmul of `source` that stores at all peers began (`count` 1) or ended (-1)."""
        for rank in range(self.ranks):
            if rank != source or self.ranks == 1:
                self.stores[rank] += count
        for rank in range(self.ranks):
            self.rate(rank, now)

    def shares(self, target: int) -> float:
        """Return the factor by which transfers to `target` slow each other down."""
        stored = self.stores[target] / max(1, self.ranks - 1)  # each is spread over all peers
        pushed = self.moves[target] if self.ranks > 1 else min(1, self.moves[target])
        return max(1.0, pushed + stored) ** SHARE

    def rate(self, rank: int, now: float) -> None:
        """Set the speeds of a rank's two queues for the items that run now."""
        compute, copy = 2 * rank, 2 * rank + 1
        place = self.running[compute]
        what = self.programs[rank][place].work.what if place >= 0 else ""
        pushes = self.target[rank] >= 0
        if what == "matmul":
            self.set(compute, now, self.matmul_speed if pushes or self.moves[rank] or self.stores[rank] else 1.0)
        elif what == "direct":
            self.set(compute, now, 1 / max(self.shares(peer) for peer in range(self.ranks) if peer != rank or self.ranks == 1))
        if pushes:
            slowed = self.with_.push if what in ("matmul", "direct") else 1.0
            self.set(copy, now, 1 / (slowed * self.shares(self.target[rank])))

    def set(self, q: int, now: float, speed: float) -> None:
        if self.running[q] < 0 or self.speed[q] == speed:
            return
        self.left[q] = max(0.0, self.left[q] - (now - self.since[q]) * self.speed[q])
        self.since[q], self.speed[q] = now, speed
        self.ends[q] = now + self.left[q] / speed
