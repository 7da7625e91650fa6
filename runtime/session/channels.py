"""The channels of a session: all ranks agree on their sizes and share their memory (csrc/core/point_to_point.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..extension import extension
from .store_exchange import Exchange


@dataclass(frozen=True)
class Channels:
    """`core`: the C++ object. `near_bytes`: of a slot between neighbours. `total_bytes`: of all slots of a rank."""

    core: Any
    slots: int
    near_bytes: int
    total_bytes: int


def share(exchange: Exchange, arena: Any, size: int, slots: int, far: int, check: Callable[[], None]) -> Channels:
    """Make the channels of a group, in step with all ranks. `arena`: that of the session."""
    exchange.op, exchange.site = "send or recv", "channels"
    doing = f"the first message of group '{exchange.group}'"

    def gather(topic: str, own: dict[str, Any]) -> list[dict[str, Any]]:
        return exchange.gather(f"channels/{topic}", own, "init", doing, check)

    requests = gather("sizes", {"size": size, "slots": slots})
    near, count = max(one["size"] for one in requests), max(one["slots"] for one in requests)
    is_cpu = exchange.device == "cpu"
    segment = extension().ChannelSegment(
        rank=exchange.rank, ranks=exchange.ranks, slots=count, near_bytes=near, far_bytes=min(near, far), has_slots=is_cpu
    )
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
    return Channels(core, count, near, segment.slot_bytes)
