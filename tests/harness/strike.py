"""Send a rank a signal at a chosen place of the runtime's protocol."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage

from ub_overlap.runtime.session.store_exchange import Exchange


def signal_before_exchange(topic: str, how: str, prepare: Callable[[], None] = lambda: None) -> None:
    """Send this process the signal `how` when it is about to exchange `topic` with its peers.

    `prepare` runs before. Topics: runtime/session/bind.py and session.py.
    """
    gather_from = Exchange.gather_from

    def strike(self: Any, ranks: Any, current: str, *rest: Any) -> Any:
        if current == topic:
            prepare()
            os.kill(os.getpid(), getattr(signal, how))
        return gather_from(self, ranks, current, *rest)

    Exchange.gather_from = strike  # type: ignore[method-assign]


MESSAGES = {
    "receives output": "get_fwd_recv_ops",
    "sends output": "get_fwd_send_ops",
    "receives gradient": "get_bwd_recv_ops",
    "sends gradient": "get_bwd_send_ops",
}
"""What a stage of a pipeline does with messages -> the method that a schedule asks for them."""


def signal_before_message(message: str, how: str, prepare: Callable[[], None]) -> None:
    """Send this process the signal `how` when it is about to issue a message of a stage. `prepare` runs before.

    `message`: one of MESSAGES, and a microbatch: "sends output 2". Where a stage has no such message, as the first one receives
    no output, it is signaled when the schedule asks for it.
    """
    what, _, microbatch = message.rpartition(" ")
    ask = getattr(PipelineStage, MESSAGES[what])

    def strike(*_args: Any, **_kwargs: Any) -> Any:
        prepare()
        os.kill(os.getpid(), getattr(signal, how))

    def ask_and_strike(self: Any, number: int) -> Any:
        messages = ask(self, number)
        if number == int(microbatch):
            for one in messages[:1]:
                one.op = strike  # in the place of isend or irecv
            if not messages:
                strike()
        return messages

    setattr(PipelineStage, MESSAGES[what], ask_and_strike)
