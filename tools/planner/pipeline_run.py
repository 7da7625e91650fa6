"""Play a pipeline's order with times: when each rank computes what, and what remains exposed.

an action begins     when its rank is free and its input is there: the stage before's output, the stage after's gradient
a message leaves     at the end of its action, or with `sends_first` at the end of the input gradient; one at a time in a
                     channel, concurrent with everything else
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .pipeline_orders import PipelineAction, PipelineOrder, Work


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Microseconds of one microbatch in a stage. `backward_us`: both gradients in one graph."""

    forward_us: float
    backward_us: float
    input_us: float
    weight_us: float


@dataclass(frozen=True, slots=True)
class Played:
    """An action with its time."""

    action: PipelineAction
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """A step of a pipeline, by rank."""

    order: PipelineOrder
    ranks: tuple[tuple[Played, ...], ...]

    @property
    def us(self) -> float:
        """The time of the step."""
        return max(row[-1].end_us for row in self.ranks)

    @property
    def busy_us(self) -> float:
        """The time for which a rank computes, the mean over ranks."""
        return sum(p.end_us - p.begin_us for row in self.ranks for p in row) / len(self.ranks)

    @property
    def bubble(self) -> float:
        """The share of the step in which a rank waits, the mean over ranks."""
        return 1 - self.busy_us / self.us

    @property
    def in_flight(self) -> int:
        """The most microbatches of stages whose activations a rank holds."""
        most = 0
        for row in self.ranks:
            held, actions = 0, [p.action for p in row]
            split = {(a.stage, a.microbatch) for a in actions if a.work is Work.WEIGHT_GRADIENT}
            for a in actions:
                ends = a.work is Work.WEIGHT_GRADIENT or (a.work is Work.BACKWARD and (a.stage, a.microbatch) not in split)
                held += (a.work is Work.FORWARD) - ends
                most = max(most, held)
        return most


def play(
    order: PipelineOrder, times: StageTimes, message_us: Callable[[int, int], float], sends_first: bool = False
) -> PipelineRun:
    """Return a step. `message_us`: from one rank to another. `sends_first`: gradients of inputs leave before W of a B.

    A backward takes input_us + weight_us then, except where it is overlapped with a forward, which sends at the end.
    """
    return _Player(order, times, message_us, sends_first).run()


class _Player:
    def __init__(
        self, order: PipelineOrder, times: StageTimes, message_us: Callable[[int, int], float], sends_first: bool
    ) -> None:
        self.order, self.message_us, self.sends_first = order, message_us, sends_first
        backward = times.input_us + times.weight_us if sends_first else times.backward_us
        self.input_us = times.input_us
        self.us = {
            Work.FORWARD: times.forward_us,
            Work.BACKWARD: backward,
            Work.INPUT_GRADIENT: times.input_us,
            Work.WEIGHT_GRADIENT: times.weight_us,
        }
        self.there: dict[tuple[bool, int, int], float] = {}  # (is a gradient, stage, microbatch) -> its arrival there
        self.channels: dict[tuple[int, int], float] = {}
        self.rows: list[list[Played]] = [[] for _ in order.ranks]

    def run(self) -> PipelineRun:
        waiting = set(range(len(self.order.ranks)))
        while waiting:
            moved = [rank for rank in waiting if self.advance(rank)]
            waiting -= {rank for rank in waiting if len(self.rows[rank]) == len(self.order.ranks[rank])}
            assert moved, f"{self.order.schedule}: no rank can go on"
        return PipelineRun(self.order, tuple(map(tuple, self.rows)))

    def advance(self, rank: int) -> bool:
        """Play the rank's actions up to one whose input is not known. Return whether there was one."""
        row, actions = self.rows[rank], self.order.ranks[rank]
        first = len(row)
        while len(row) < len(actions):
            action = actions[len(row)]
            arrival = self.arrival(action)
            if arrival is None:
                break
            begin = max(row[-1].end_us if row else 0.0, arrival)
            row.append(Played(action, begin, begin + self.us[action.work]))
            sent = self.sent_now(actions, len(row) - 1)
            for i in sent:
                self.send(rank, row[i], row[-1].end_us, may_be_early=len(sent) == 1)
        return len(row) > first

    def arrival(self, action: PipelineAction) -> float | None:
        is_gradient = action.work is not Work.FORWARD
        is_edge = action.stage == (self.order.stages - 1 if is_gradient else 0)
        if is_edge or action.work is Work.WEIGHT_GRADIENT:  # the own input gradient comes before it in the order
            return 0.0
        return self.there.get((is_gradient, action.stage, action.microbatch))

    def sent_now(self, actions: tuple[PipelineAction, ...], last: int) -> list[int]:
        """Return the actions whose messages are sent at the end of the action `last`."""
        return [i for i in range(max(0, last - 1), last + 1) if i + actions[i].sends_with == last]

    def send(self, rank: int, played: Played, end: float, may_be_early: bool) -> None:
        a = played.action
        if a.work is Work.WEIGHT_GRADIENT:
            return
        is_gradient = a.work is not Work.FORWARD
        receiver = a.stage - 1 if is_gradient else a.stage + 1
        if not 0 <= receiver < self.order.stages:
            return
        if self.sends_first and a.work is Work.BACKWARD and may_be_early:
            end = played.begin_us + self.input_us
        peer = self.order.rank_of[receiver]
        if peer != rank:
            channel = rank, peer
            end = self.channels[channel] = max(end, self.channels.get(channel, 0.0)) + self.message_us(*channel)
        self.there[is_gradient, receiver, a.microbatch] = end
