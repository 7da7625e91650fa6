"""The only file that assembles a c10d process group from its private parts.

Names of private modules are in `_torch_compat.py`. Tests of the c10d backend run it on the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import _torch_compat


def make_process_group(options: Any, nccl_options: Any, wrap: Callable[[str], None]) -> Any:
    """Return a process group with gloo for CPU tensors and NCCL for CUDA tensors, where this process has them.

    `options`: the argument of a creator that `Backend.register_backend(extended_api=True)` registers. `nccl_options`: the
    caller's `pg_options`, or None. `wrap(name)`: called while ops can find the group by its name.
    """
    import torch.distributed as dist

    group: Any = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    add_backends(
        group, options.store, options.timeout, options.global_ranks_in_group, options.group_id, _has_nccl(), nccl_options
    )
    _torch_compat.register_group(options.group_id, group)
    try:
        wrap(options.group_id)
    finally:
        _torch_compat.unregister_group(options.group_id)  # torch registers it when it is complete
    return group


def add_backends(
    group: Any, store: Any, timeout: Any, global_ranks: Sequence[int], name: str, with_nccl: bool, nccl_options: Any = None
) -> None:
    """Give `group` gloo for CPU tensors, and NCCL for CUDA tensors if `with_nccl`. Collective over its ranks with gloo.

    NCCL's communicator is its own. torch may split one from the world's instead, which takes all ranks of the world.
    """
    import torch
    import torch.distributed as dist

    builds: Any = dist  # has ProcessGroupNCCL where torch was built with it
    kinds: Any = dist.ProcessGroup.BackendType
    where = (group.rank(), group.size())
    group._set_default_backend(kinds.NCCL if with_nccl else kinds.GLOO)
    gloo = builds.ProcessGroupGloo(dist.PrefixStore("cpu/", store), *where, timeout)
    backends = [("cpu", kinds.GLOO, gloo)]
    if with_nccl:
        chosen = nccl_options or builds.ProcessGroupNCCL.Options()
        chosen._timeout = timeout
        chosen.global_ranks_in_group = list(global_ranks)
        chosen.group_name = name
        nccl = builds.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), *where, chosen)
        backends.append(("cuda", kinds.NCCL, nccl))
    for device, kind, backend in backends:
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(device), kind, backend)
    group._set_group_name(name)


def uses_nccl(group: Any) -> bool:
    """Return whether `group` has NCCL for CUDA tensors, by itself or within another backend."""
    import torch

    try:
        return _has_nccl() and group._get_backend(torch.device("cuda")).name() != "gloo"
    except RuntimeError:  # no backend for such tensors
        return False


def name_group(store: Any, rank: int, size: int, name: str) -> Any:
    """Return a process group without backends that ops find by its name. c10d keeps the name with its backends."""
    import torch.distributed as dist

    group: Any = dist.ProcessGroup(store, rank, size)
    _torch_compat.register_group(name, group)
    return group


def _has_nccl() -> bool:
    import torch
    import torch.distributed as dist

    return dist.is_nccl_available() and torch.cuda.is_available()


def new_group_like(group: Any, backend: str, creation_timeout: Any, timeout: Any, description: str) -> Any:
    """Return a new process group with the ranks of `group`, in the same order. Collective over those ranks alone.

    dist.new_group(use_local_synchronization=True) derives the name from the number of groups that this rank is in. Ranks that
    are in different numbers of groups would wait for each other under different names. Here each rank counts the groups
    that it has made from `group`, in its Store: a later group of the same name goes on counting.
    `creation_timeout`: of the waits for the other ranks, here. `timeout`: of the collectives.
    """
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    store, ranks, rank = _torch_compat.store_of(group), dist.get_process_group_ranks(group), group.rank()
    number = store.add(f"ub_overlap/groups/{rank}", 1)
    made, _ = _torch_compat.new_named_group(
        len(ranks), rank, ranks, dist.Backend(backend), store, f"{group.group_name}.ub_overlap.{number}",
        timeout=creation_timeout, device_id=world.bound_device_id, group_desc=description,
    )  # fmt: skip
    _torch_compat.c10d_world.pg_group_ranks[made] = {global_rank: index for index, global_rank in enumerate(ranks)}
    made.set_timeout(timeout)
    return made
