"""The only file that assembles a c10d process group from its private parts.

Names of private modules are in `_torch_compat.py`. Tests of the c10d backend run it on the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _torch_compat


def make_process_group(options: Any, nccl_options: Any, wrap: Callable[[str], None]) -> Any:
    """Return a process group with gloo for CPU tensors and NCCL for CUDA tensors, where this process has them.

    `options`: the argument of a creator that `Backend.register_backend(extended_api=True)` registers. `nccl_options`: the
    caller's `pg_options`, or None. `wrap(name)`: called while ops can find the group by its name.
    """
    import torch
    import torch.distributed as dist

    builds: Any = dist  # has ProcessGroupNCCL where torch was built with it
    group: Any = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    kinds: Any = dist.ProcessGroup.BackendType
    where = (options.group_rank, options.group_size)
    with_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    group._set_default_backend(kinds.NCCL if with_nccl else kinds.GLOO)
    gloo = builds.ProcessGroupGloo(dist.PrefixStore("cpu/", options.store), *where, options.timeout)
    backends = [("cpu", kinds.GLOO, gloo)]
    if with_nccl:
        nccl_class = builds.ProcessGroupNCCL
        chosen = nccl_options or nccl_class.Options()
        chosen._timeout = options.timeout
        chosen.global_ranks_in_group = options.global_ranks_in_group
        chosen.group_name = options.group_id
        nccl = nccl_class(dist.PrefixStore("cuda/", options.store), *where, chosen)
        backends.append(("cuda", kinds.NCCL, nccl))
    for device, kind, backend in backends:
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(device), kind, backend)
    group._set_group_name(options.group_id)
    _torch_compat.register_group(options.group_id, group)
    try:
        wrap(options.group_id)
    finally:
        _torch_compat.unregister_group(options.group_id)  # torch registers it when it is complete
    return group


def new_group_like(group: Any, backend: str, timeout: Any, description: str) -> Any:
    """Return a new process group with the ranks of `group`, in the same order. Collective over those ranks alone.

    dist.new_group(use_local_synchronization=True) derives the name from the number of groups that this rank is in. Ranks that
    are in different numbers of groups would wait for each other under different names. Here each rank counts the groups
    that it has made from `group`, in its Store: a later group of the same name goes on counting.
    """
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    store, ranks, rank = _torch_compat.store_of(group), dist.get_process_group_ranks(group), group.rank()
    number = store.add(f"ub_overlap/groups/{rank}", 1)
    made, _ = _torch_compat.new_named_group(
        len(ranks), rank, ranks, dist.Backend(backend), store, f"{group.group_name}.ub_overlap.{number}",
        timeout=timeout, device_id=world.bound_device_id, group_desc=description,
    )  # fmt: skip
    _torch_compat.c10d_world.pg_group_ranks[made] = {global_rank: index for index, global_rank in enumerate(ranks)}
    return made
