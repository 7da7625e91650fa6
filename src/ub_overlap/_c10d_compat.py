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
