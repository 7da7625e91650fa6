"""Rank functions of test_hosts.py: split collectives of groups whose ranks are declared to be on different hosts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ub_overlap
from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import settings
from ub_overlap.runtime.session import spared_multiprocessors
from ub_overlap.runtime.session.bind import find_session
from ub_overlap.runtime.session.host_layout import find_layout, hosts_of, size_of

from . import rank_ops, rank_split
from .oracle import data
from .rank_failures import attempt, fresh
from .rank_sessions import OPS, C, gather, reset
from .rank_split import finish, start


@contextlib.contextmanager
def one_rank_a_host(world: int) -> Iterator[str]:
    """Yield a new group that has no transport of ours. The functions of rank_split use it as their group."""
    with reset(), contextlib.ExitStack() as stack:
        settings.configure(hosts="1")
        name, original = fresh(world), rank_ops.group
        stack.callback(setattr, rank_ops, "group", original)
        rank_ops.group = lambda: name
        yield name


def run(rank: int, world: int, function: str, *args: Any) -> Any:
    """Run a function of rank_split on a group across hosts."""
    with one_rank_a_host(world) as name:
        found = getattr(rank_split, function)(rank, world, *args)
        sessions = [s for s in C.sessions() if s.group == name]
        assert all((s.transport, "do not share memory" in s.reason) == ("c10d", True) for s in sessions)
        return found


def runs_meanwhile(rank: int, world: int) -> dict[str, Any]:
    """A collective makes progress between start and finish: the first rank finishes it before its peers call anything again."""
    with one_rank_a_host(world) as name:
        shard = data(4, 4, seed=rank)
        site = {"site": "/meanwhile"}
        token = start(name, "all_gather", shard, **site)
        left = [len(opened(name))]
        store, key = compat.store_of(dist.group.WORLD), f"rank_hosts/{name}/finished"
        if rank > 0:
            store.wait([key], timedelta(seconds=20))
        out = finish(name, "all_gather", token, shard, **site)
        if rank == 0:
            store.set(key, "")
        stats = C.site_stats()["/meanwhile"]
        return {
            "right": torch.equal(out, torch.cat([data(4, 4, seed=r) for r in range(world)])),
            "open": [*left, len(opened(name))],
            "calls": stats["calls"],
            "transport": stats["transport"],
        }


def opened(name: str) -> list[int]:
    """Return the split slots of a group whose collective is open."""
    session = find_session(name, "cpu")
    assert session is not None
    return list(session.core.open_plain())


def several_at_once(rank: int, world: int) -> list[str]:
    """Eight open collectives are launched in the order of their starts, and end in another order."""
    with one_rank_a_host(world) as name:
        shards = [data(2, 3, seed=10 * slot + rank) for slot in range(8)]
        tokens = [start(name, "all_gather", shard, slot) for slot, shard in enumerate(shards)]
        bad = [] if sorted(opened(name)) == list(range(8)) else ["not all are open"]
        for slot in (3, 0, 7, 1, 6, 2, 5, 4):
            out = finish(name, "all_gather", tokens[slot], shards[slot], slot)
            if not torch.equal(out, torch.cat([data(2, 3, seed=10 * slot + r) for r in range(world)])):
                bad.append(f"slot {slot}")
        return bad


def spares(rank: int, world: int) -> dict[str, Any]:
    """Return torch's carve-out at moments of split collectives, as if NCCL ran them."""
    found: dict[str, Any] = {}
    with one_rank_a_host(world) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(spared_multiprocessors, "most_spared", lambda group, device: 8)
        shard = data(4, 4, seed=rank)
        tokens = [start(name, "all_gather", shard, slot) for slot in range(2)]
        seen = [compat.get_carveout()]
        for slot, token in enumerate(tokens):
            finish(name, "all_gather", token, shard, slot)
            seen.append(compat.get_carveout())
        found["open"] = seen
        token = start(name, "all_reduce", shard[:0])
        found["empty"] = compat.get_carveout()
        finish(name, "all_reduce", token, shard[:0])
        token = start(name, "all_gather", shard)
        found["left"] = [compat.get_carveout()]
        del token, tokens
        found["left"].append(compat.get_carveout())
        gather(name, rank, world, 4)
        group: Any = dist.new_group(list(range(world)))
        token = start(group.group_name, "all_gather", shard)
        found["group ended"] = [compat.get_carveout()]
        dist.barrier()
        dist.destroy_process_group(group)
        C.close_destroyed_groups()
        del token
        found["group ended"].append(compat.get_carveout())
        aborted: Any = dist.new_group(list(range(world)))
        token = start(aborted.group_name, "all_gather", shard)
        found["aborted"] = [compat.get_carveout()]
        ub_overlap.abort(aborted.group_name, reason="enough")
        error = attempt(lambda: finish(aborted.group_name, "all_gather", token, shard))["error"]
        found["aborted"] += [error, compat.get_carveout(), len(opened(aborted.group_name))]
        dist.barrier()
        dist.destroy_process_group(aborted)
        C.close_destroyed_groups()
    return found


def others_go_on(rank: int, world: int) -> list[bool]:
    """While one thread waits for a plain collective, another one runs a call that the peers need before they come to it.

    Return whether both results are right, and whether a peer's error could be asked for meanwhile.
    """
    with reset():
        settings.configure(step_timeout_s=20.0)
        name, shard = fresh(world), data(4, 4, seed=rank)
        truth = torch.cat([data(4, 4, seed=r) for r in range(world)])
        gather(name, rank, world, 4)
        token = start(name, "all_gather", shard, strategy="none") if rank == 0 else None
        if rank > 0:
            given = (shard, [], [], "all_gather", "sum", shard.dtype, "bulk", name, "/bulk")
            bulk = OPS.bulk(*given)[0]
            found = finish(name, "all_gather", start(name, "all_gather", shard, strategy="none"), shard, strategy="none")
            return [torch.equal(bulk, truth), torch.equal(found, truth), True]
        results: dict[str, torch.Tensor] = {}

        def wait() -> None:
            results["plain"] = finish(name, "all_gather", token, shard, strategy="none")

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)
        session = find_session(name, "cpu")
        assert session is not None
        session.core.check()
        waits = thread.is_alive()
        results["bulk"] = OPS.bulk(shard, [], [], "all_gather", "sum", shard.dtype, "bulk", name, "/bulk")[0]
        thread.join(30)
        return [torch.equal(results["bulk"], truth), torch.equal(results["plain"], truth), waits]


def share_a_slot(rank: int, world: int) -> list[str]:
    """Return the errors of starts in a slot that a collective of the other kind has, and of the finish."""
    name, shard = fresh(world), data(4, 4, seed=rank)
    errors = []
    for first, second in (("bulk", "none"), ("none", "bulk")):
        token = start(name, "all_gather", shard, strategy=first)
        errors.append(attempt(lambda second=second: start(name, "all_gather", shard, strategy=second))["error"])
        out = finish(name, "all_gather", token, shard, strategy=first)
        errors.append("" if torch.equal(out, torch.cat([data(4, 4, seed=r) for r in range(world)])) else "wrong")
    return errors


def dies_between(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """The last rank ends between start and finish, before its peers have its data."""
    with one_rank_a_host(world) as name:
        settings.configure(step_timeout_s=step_s)
        gather(name, rank, world, 4)
        if rank == world - 1:
            os._exit(0)
        shard = data(4, 4, seed=rank)
        token = start(name, "all_reduce", shard)
        return attempt(lambda: finish(name, "all_reduce", token, shard))


def stays_away(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """The last rank does not start; it lives."""
    with one_rank_a_host(world) as name:
        gather(name, rank, world, 4)
        dist.barrier()
        settings.configure(step_timeout_s=step_s)
        found = {}
        if rank != world - 1:
            shard = data(4, 4, seed=rank)
            token = start(name, "all_gather", shard)
            found = {**attempt(lambda: finish(name, "all_gather", token, shard)), "left": len(opened(name))}
        dist.barrier()
        return found


def aborted(rank: int, world: int) -> dict[str, Any]:
    """The last rank does not start. Another thread of the others aborts the group while they wait."""
    with one_rank_a_host(world) as name:
        gather(name, rank, world, 4)
        found = {}
        if rank != world - 1:
            shard = data(4, 4, seed=rank)
            token = start(name, "all_gather", shard)
            timer = threading.Timer(0.3, lambda: ub_overlap.abort(name, reason="enough"))
            timer.start()
            found = attempt(lambda: finish(name, "all_gather", token, shard))
        dist.barrier()
        return found


def freed(rank: int, world: int) -> list[int]:
    """Destroy a group with an open collective. Return the open ones, and those that are kept."""
    with one_rank_a_host(world):
        group: Any = dist.new_group(list(range(world)))
        start(group.group_name, "all_gather", data(4, 4, seed=rank))
        session = find_session(group.group_name, "cpu")
        assert session is not None
        found = [len(session.core.open_plain())]
        dist.barrier()
        dist.destroy_process_group(group)
        C.close_destroyed_groups()
        return [*found, len(session.core.open_plain())]


def layouts(rank: int, world: int, declared: str, environment: dict[str, str]) -> tuple[Any, Any]:
    """Return the hosts of the world, and of its even ranks, as the setting or a launcher gives them."""
    even = dist.new_group(list(range(0, world, 2)))
    with reset():
        settings.configure(hosts=declared)
        own = {key: value.format(rank=rank) for key, value in environment.items()}
        before = dict(os.environ)
        os.environ.update(own)
        try:
            world_group: Any = dist.group.WORLD
            groups = [world_group.group_name, *([even.group_name] if rank % 2 == 0 else [])]
            return [hosts_of(name) for name in groups], attempt(lambda: hosts_of(groups[0]))
        except ValueError as error:
            return None, str(error)
        finally:
            os.environ.clear()
            os.environ.update(before)


def host_layouts(rank: int, world: int, declared: str) -> list[tuple[int, int] | None]:
    """Return (hosts, ranks of each) of the world, and of its even ranks and its first two where this rank is one of them."""
    others = [(ranks, dist.new_group(ranks)) for ranks in (list(range(0, world, 2)), [0, 1])]
    with reset():
        settings.configure(hosts=declared)
        world_group: Any = dist.group.WORLD
        names = [world_group.group_name, *(one.group_name for ranks, one in others if rank in ranks)]
        found = [find_layout(name) for name in names]
        assert all(
            one is None or (size_of(one.across), size_of(one.within)) == (one.hosts, one.ranks_per_host) for one in found
        )
        return [None if one is None else (one.hosts, one.ranks_per_host) for one in found]
