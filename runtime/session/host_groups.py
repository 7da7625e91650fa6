"""The two groups of a hierarchical collective: the ranks of this rank's host, and those of its number on all hosts.

Graphs hold their names (host_layout.py). Their ranks make them in two steps:

    name_host_groups   in every compilation, also of a graph from a cache: the names, without asking other ranks
    complete           at the first call, when the group binds: gloo and NCCL, together with its other ranks

The compiler cannot do the second: ranks that find a graph in a cache do not compile it, and the others would wait for them.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch.distributed as dist

from ub_overlap import _torch_compat as compat
from ub_overlap._c10d_compat import add_backends, name_group, uses_nccl

from . import inherited_groups, own_groups
from .abort_signal import AbortSignal
from .group_creation import create, creation_limit
from .host_layout import find_layout, world_hosts
from .origin import Origin, make_origin

_lock = threading.Lock()
_origins: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], range, Any]] = weakref.WeakKeyDictionary()
"""By group of ours: the group that it is made from, its ranks there, and its Store."""


def name_host_groups() -> None:
    """Let ops find the groups of all process groups that have several ranks on each of several hosts."""
    for origin in compat.process_groups() if world_hosts() else ():
        if origin.size() < 4 or dist.get_backend(origin) == "fake" or inherited_groups.is_inherited(origin):
            continue
        with _lock:
            _name_groups_of(origin)


def _name_groups_of(origin: Any) -> None:
    layout = find_layout(origin.group_name)
    if layout is None or own_groups.find_group(origin, layout.within) is not None:
        return
    each = layout.ranks_per_host
    host, number = divmod(origin.rank(), each)
    across, within = range(number, origin.size(), each), range(host * each, (host + 1) * each)
    for name, ranks in ((layout.across, across), (layout.within, within)):
        store = dist.PrefixStore(f"{name}.{ranks[0]}", compat.store_of(origin))
        made = name_group(store, ranks.index(origin.rank()), len(ranks), name)
        _origins[made] = weakref.ref(origin), ranks, store
        own_groups.add_group(origin, name, made, name)


def origin_of(group: Any) -> Origin:
    """Return the origin of a process group, of ours or c10d's."""
    reference, ranks, _ = _origins.get(group, (None, None, None))
    origin = reference() if reference else None
    return make_origin(group) if origin is None else make_origin(origin, ranks)


def store_of(group: Any) -> Any:
    """Return the Store of a process group, of ours or c10d's."""
    return _origins[group][2] if group in _origins else compat.store_of(group)


def complete(name: str, attempt: str, where: str, abort: AbortSignal) -> None:
    """Give the group `name` its backends if it is one of these. Collective over its ranks.

    `attempt`: a text that no earlier session of the group had. `where`: the op and its site. `abort`: ends it.
    """
    group = compat.group_of(name)
    if group not in _origins:
        return
    reference, ranks, store = _origins[group]
    origin = reference()
    assert origin is not None, "the group would be unknown"
    if inherited_groups.is_inherited(origin):
        raise inherited_groups.fork_error(name)
    if compat.device_types(group):
        return
    global_ranks = [compat.global_ranks(origin)[rank] for rank in ranks]
    own = dist.PrefixStore(attempt, store)  # a backend uses its keys once
    with_nccl = uses_nccl(origin)

    def body() -> None:
        add_backends(group, own, creation_limit(), global_ranks, name, with_nccl)

    fix = "look at the other ranks; hierarchical='off' needs no further groups"
    create(body, abort, ranks, origin.group_name, where, fix)
