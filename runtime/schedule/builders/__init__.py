"""Builders: one pure function per kind, from (key, rank) to a `Schedule`.

A builder proves nothing. `checker.check` proves any schedule, built or written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ..schedule_error import ScheduleError
from ..steps import Key, Schedule
from . import (
    all_to_all,
    fused_collectives,
    pipelined_all_reduce,
    pipelined_gather,
    pipelined_reduce_scatter,
    point_to_point,
    whole_collectives,
)

BUILDERS: dict[str, Callable[[Key, int], Schedule]] = {
    "all_gather_matmul": pipelined_gather.build,
    "matmul_reduce_scatter": pipelined_reduce_scatter.build,
    "matmul_all_reduce": pipelined_all_reduce.build,
    "bulk_all_gather": whole_collectives.build_all_gather,
    "bulk_reduce_scatter": whole_collectives.build_reduce_scatter,
    "bulk_all_reduce": whole_collectives.build_all_reduce,
    "split_all_gather": whole_collectives.build_all_gather,
    "split_reduce_scatter": whole_collectives.build_reduce_scatter,
    "split_all_reduce": whole_collectives.build_all_reduce,
    "split_all_to_all": all_to_all.build,
    "point_to_point": point_to_point.build,
    "one_shot_all_gather": fused_collectives.build_all_gather,
    "one_shot_reduce_scatter": fused_collectives.build_reduce_scatter,
    "one_shot_all_reduce": fused_collectives.build_one_shot_all_reduce,
    "two_shot_all_reduce": fused_collectives.build_two_shot_all_reduce,
}


def build(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for `key`."""
    check_key(key)
    if not 0 <= rank < key.ranks:
        raise ScheduleError("key", f"rank {rank} is not in a group of {key.ranks} ranks (0 to {key.ranks - 1})")
    return BUILDERS[key.kind](key, rank)


@lru_cache(maxsize=256)
def build_all(key: Key) -> tuple[Schedule, ...]:
    """Build the schedules of all ranks, in rank order."""
    return tuple(build(key, rank) for rank in range(key.ranks))


def check_key(key: Key) -> None:
    """Raise ScheduleError for an invalid key, with the field and the reason."""

    def refuse(what: str) -> None:
        raise ScheduleError("key", f"{what}; in {key}")

    gathers, scatters = key.kind == "all_gather_matmul", key.kind.startswith("matmul_")
    if key.kind not in BUILDERS:
        refuse(f"kind {key.kind!r} is unknown, expected one of {', '.join(BUILDERS)}")
    if key.ranks < 1:
        refuse(f"a group has at least one rank, got {key.ranks}")
    if key.chunks < 0:
        refuse(f"chunks must be 0 (one per rank) or more, got {key.chunks}")
    if key.shard_dim_is_last and key.chunks > key.ranks:
        refuse(f"shards cannot be cut (shard_dim_is_last), so chunks is at most {key.ranks}, got {key.chunks}")
    if key.striped and (key.shard_dim_is_last or not scatters):
        refuse("striped needs a matmul whose shards can be cut")
    if key.direct and (key.shard_dim_is_last or not scatters or key.terms != 1):
        refuse("direct needs a product of one term whose shards are blocks of rows")
    if key.direct and (key.ranks == 1 or key.striped or key.chunks):
        refuse("direct stores whole shards at peers: it needs two ranks or more, and has neither chunks nor stripes")
    if key.contracts and not gathers:
        refuse("only all_gather_matmul has consumers that contract: leave contracts empty")
    if key.engine_copies and not gathers:
        refuse("engine_copies needs a gather with matmuls of its own")
    if gathers and not key.contracts and not key.keep:
        refuse("the gathered tensor has no use: name a consumer or set keep")
    if scatters and key.terms < 1:
        refuse("a reduction has at least one term: set terms")
    if not scatters and key.terms:
        refuse("only a reduction of products has terms: leave terms at 0")
    if key.independent < 0:
        refuse(f"independent must be 0 or more, got {key.independent}")
    if key.zero_copy and key.kind != "split_all_gather":
        refuse("zero_copy needs a split all_gather")
    if key.is_channel and (key.ranks != 2 or key.chunks < 1 or key.independent):
        refuse("a channel has two ends, one slot (chunks) or more, and no matmuls")
    if key.is_fused and (key.chunks or key.independent or key.shard_dim_is_last or key.striped):
        refuse("a fused collective is not cut, and has no matmuls: leave chunks, independent and the layouts as they are")
    if key.is_all_to_all and key.shard_dim_is_last:
        refuse("an all_to_all moves rows: leave shard_dim_is_last at False")
    if key.is_split and key.independent:
        refuse("a split collective has no matmuls of its own: leave independent at 0")
