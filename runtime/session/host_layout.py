"""The hosts of a group's ranks, as every rank knows them at compile time, without asking the others.

A group with several ranks on each of several hosts has two groups of ours, whose names follow from its own: the ranks of this
host, and the ranks of one number on all hosts. Hierarchical collectives use them (host_groups.py makes them):

    ranks 0 1 2 3 on hosts a a b b     within a host: (0 1), (2 3)     across hosts: (0 2), (1 3)

From the setting `hosts`, else from a launcher that gives all hosts the same number of ranks (LOCAL_WORLD_SIZE, as torchrun sets
it), else one host. Decisions need them before the group binds. They only choose between strategies: when the group binds, the
ranks compare the hosts that they really are on (host.py, bind.py), and calls run on the transport that follows.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch.distributed as dist

from ub_overlap import _torch_compat as compat

from .. import errors, settings


def hosts_of(group: str) -> tuple[str, ...]:
    """Return a name of the host of each rank of `group`, by rank in the group; of one host where nothing says more.

    OptionError for a setting `hosts` that does not fit.
    """
    world = world_hosts()
    ranks = compat.global_ranks(compat.group_of(group)) if world else []
    if not ranks or max(ranks) >= len(world):  # a group that c10d does not know, or of ranks that are not there: a mirror
        return ("",)
    return tuple(world[rank] for rank in ranks)


def own_host() -> str:
    """Return the host that the setting `hosts` declares for this rank, "" without the setting."""
    world = world_hosts() if settings.current().hosts else ()
    return world[dist.get_rank()] if world else ""


def world_hosts() -> tuple[str, ...]:
    """Return the host of each rank of the world; () where nothing says that there are several, and without a world."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    declared, ranks = settings.current().hosts, dist.get_world_size()
    if declared:
        names = declared.split(",")
        if len(names) == 1 and names[0].isdigit() and 0 < int(names[0]) <= ranks and ranks % int(names[0]) == 0:
            return tuple(str(rank // int(names[0])) for rank in range(ranks))
        if len(names) == ranks:
            return tuple(name.strip() for name in names)
        raise errors.OptionError(
            "the setting 'hosts' does not fit the world",
            where=f"ub_overlap.configure(hosts=...) or {settings.environment_name('hosts')}",
            got=f"{declared!r}, {ranks} ranks",
            expected="the number of ranks of each host, which divides the world, or one name for every rank: '0,0,1,1'",
        )
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_launched = os.environ.get("WORLD_SIZE") == str(ranks) and os.environ.get("RANK") == str(dist.get_rank())
    if is_launched and local.isdigit() and 0 < int(local) < ranks and ranks % int(local) == 0:
        return tuple(str(rank // int(local)) for rank in range(ranks))
    return ()


HOST_GROUP = re.compile(r"(?P<origin>.+)\.(?P<hosts>\d+)x(?P<each>\d+)\.(?P<kind>across|within)")
"""The name of one of the two groups, in full."""


@dataclass(frozen=True, slots=True)
class HostLayout:
    """`group` has `ranks_per_host` ranks on each of `hosts` hosts, one host after the other."""

    group: str
    hosts: int
    ranks_per_host: int

    @property
    def across(self) -> str:
        """The name of the group of the ranks that have this rank's number on their hosts."""
        return f"{self.group}.{self.hosts}x{self.ranks_per_host}.across"

    @property
    def within(self) -> str:
        """The name of the group of the ranks on this rank's host."""
        return f"{self.group}.{self.hosts}x{self.ranks_per_host}.within"


def find_layout(group: str) -> HostLayout | None:
    """Return the layout of `group`.

    None for a group within one host, with one rank on each, with unequal numbers, or whose hosts' ranks are not in a row.
    """
    names = hosts_of(group)
    hosts = list(dict.fromkeys(names))
    each = len(names) // len(hosts)
    if len(hosts) < 2 or each < 2 or list(names) != [host for host in hosts for _ in range(each)]:
        return None
    return HostLayout(group, len(hosts), each)


def size_of(group: str) -> int:
    """Return the number of ranks of `group`, which may be one of the two groups and need not be made yet."""
    match = HOST_GROUP.fullmatch(group)
    if match is None:
        return int(compat.group_of(group).size())
    return int(match["hosts"] if match["kind"] == "across" else match["each"])
