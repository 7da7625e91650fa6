"""The channels of a session: all ranks agree on their sizes and share their memory (csrc/core/point_to_point.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..extension import extension
from .store_exchange import Exchange

PIECE_BYTES = 16 << 20
"""The most bytes of a slot. The destination copies a piece of a message out while the next one arrives: smaller pieces leave
less to copy after the last arrival, and cost more waits and flags."""
ROUND = 1 << 16
"""Slots are a multiple of these bytes."""
_MOST_SLOTS = 64


@dataclass(frozen=True)
class Channels:
    """`core`: the C++ object. `slot_bytes`: of a slot between neighbours. `total_bytes`: of all slots of a rank.

    A channel between neighbours holds `messages` of `message_bytes`.
    """

    core: Any
    slots: int
    slot_bytes: int
    total_bytes: int
    messages: int

    @property
    def message_bytes(self) -> int:
        return self.slots // self.messages * self.slot_bytes


@dataclass(frozen=True)
class SlotPlan:
    """How the memory of a channel is cut. `far_bytes`: of a slot between ranks that are not neighbours."""

    slots: int
    near_bytes: int
    far_bytes: int


def cut_slots(size: int, messages: int, far: int) -> SlotPlan:
    """Return the slots of channels that hold `messages` of `size` bytes, and of `far` bytes between other ranks.

    Large messages have several slots each, of at most PIECE_BYTES where 64 slots are enough for that.
    """
    pieces = max(1, min(-(-size // PIECE_BYTES), _MOST_SLOTS // messages))
    near = _rounded(size, pieces)
    return SlotPlan(messages * pieces, near, min(near, _rounded(far, pieces)))


def _rounded(size: int, pieces: int) -> int:
    return -(-size // (pieces * ROUND)) * ROUND


def share(exchange: Exchange, arena: Any, size: int, slots: int, far: int, check: Callable[[], None]) -> Channels:
    """Make the channels of a group, in step with all ranks. `arena`: that of the session.

    `size`, `slots`: bytes and number of messages that a channel between neighbours holds. `far`: bytes between other ranks.
    """
    exchange.op, exchange.site = "send or recv", "channels"
    doing = f"the first message of group '{exchange.group}'"

    def gather(topic: str, own: dict[str, Any]) -> list[dict[str, Any]]:
        return exchange.gather(f"channels/{topic}", own, "init", doing, check)

    requests = gather("sizes", {"size": size, "slots": slots})
    messages = max(one["slots"] for one in requests)
    plan = cut_slots(max(one["size"] for one in requests), messages, far)
    is_cpu = exchange.device == "cpu"
    segment = extension().ChannelSegment(
        rank=exchange.rank, ranks=exchange.ranks, slots=plan.slots, near_bytes=plan.near_bytes, far_bytes=plan.far_bytes,
        has_slots=is_cpu,
    )  # fmt: skip
    try:
        for rank, peer in enumerate(gather("addresses", {"address": segment.address})):
            reason = "" if rank == exchange.rank else segment.attach(rank, peer["address"])
            if reason:
                check()  # a rank that has died is the better error
                raise errors.ArenaError(f"cannot attach the channels of rank {rank}", got=reason)
        gather("attached", {})
    finally:
        segment.stop_sharing()
    if is_cpu:
        core = extension().CpuPointToPoint(arena=arena, segment=segment)
    else:
        memory = arena.share_channels(segment, lambda token: [one["token"] for one in gather("memory", {"token": token})])
        core = extension().CudaPointToPoint(arena=arena.core, segment=segment, memory=memory)
    gather("ready", {})
    return Channels(core, plan.slots, plan.near_bytes, segment.slot_bytes, messages)
