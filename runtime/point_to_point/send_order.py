"""The order in which a rank's stages send, so that a send that is issued early keeps its place in the channel.

A schedule issues the sends of a rank in an order that the receiving rank knows. A stage may issue one before the schedule asks
for it, if no other message to that rank is computed and still to be sent. No other may then be sent before the schedule asks.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from .. import errors


class Outgoing(NamedTuple):
    """One microbatch's output (`is_gradient`: its input's gradient) of a stage on this rank."""

    stage: int
    microbatch: int
    is_gradient: bool

    def __str__(self) -> str:
        return f"{'gradient' if self.is_gradient else 'output'} of stage {self.stage}, microbatch {self.microbatch}"


class SendOrder:
    """The messages of this rank's stages in one group that are computed and that the schedule has not sent."""

    def __init__(self) -> None:
        self._unsent: dict[Outgoing, int] = {}
        self._early: dict[Outgoing, int] = {}

    def add(self, message: Outgoing, peer: int) -> None:
        """Note that a message to rank `peer` is computed."""
        self._unsent[message] = peer

    def may_send_early(self, peer: int) -> bool:
        """Return whether a message to `peer` that is sent now keeps its place."""
        return peer not in self._unsent.values()

    def add_early(self, message: Outgoing, peer: int) -> None:
        """Note that a message was sent before the schedule asks for it."""
        self._early[message] = peer

    def send(self, message: Outgoing) -> None:
        """Note that the schedule sends a message. OptionError if one that was sent early should have come after it."""
        self._early.pop(message, None)
        peer = self._unsent.pop(message, None)
        before = [str(one) for one, other in self._early.items() if other == peer]
        if before:
            raise errors.OptionError(
                "the schedule sends in another order than the stages",
                where=f"ub_overlap.pipeline.Stage: {message}",
                got=f"{', '.join(before)} was sent before it",
                expected="a schedule that sends a stage's gradient before it sends what is computed later",
                fix="use torch's PipelineStage with this schedule",
            )

    def forget(self, stage: int) -> None:
        """Forget the messages of a stage."""
        for messages in (self._unsent, self._early):
            for one in [one for one in messages if one.stage == stage]:
                del messages[one]


_orders: weakref.WeakKeyDictionary[Any, SendOrder] = weakref.WeakKeyDictionary()
"""By process group."""


def of_group(group: Any) -> SendOrder:
    """Return the order of sends in a process group, the same for all stages of this rank."""
    return _orders.setdefault(group, SendOrder())
