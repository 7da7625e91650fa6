"""Which groups the runtime supports, by facts that are equal on all ranks at compile time.

Facts about the peers (ranks on several hosts, GPUs without peer access) are determined when the group binds, at its first
call (bind.py).
"""

from __future__ import annotations

from functools import lru_cache

from .host_layout import hosts_of, world_hosts


@lru_cache(maxsize=1)
def executor_devices() -> frozenset[str]:
    """Return the device types that this build has an executor for."""
    from ..errors import BuildMismatchError

    try:
        from ..extension import extension

        return frozenset({"cpu", "cuda"} if extension().build_info()["cuda"] else {"cpu"})
    except BuildMismatchError:  # a build that only inspects graphs
        return frozenset({"cpu"})


def _cuda_note(device: str) -> str:
    """Return why CUDA is not part of the extension, in parentheses; "" for other devices and without an extension."""
    from ..errors import BuildMismatchError
    from ..extension import cuda_note

    try:
        return f" ({cuda_note()})" if device == "cuda" else ""
    except BuildMismatchError as error:
        return f" ({error.what})"


def unsupported_reason(device: str, group: str, ranks: int) -> str | None:
    """Return why a group of `ranks` ranks cannot be served on tensors of `device`, None where it can."""
    from ub_overlap import _torch_compat as compat

    if device not in executor_devices():
        return f"this build has no executor for {device} tensors{_cuda_note(device)}"
    if compat.is_fake_group(group):
        return "the group is a fake process group: its ranks do not exist"
    if kind := compat.foreign_type(group):
        return f"the group is a {kind}: its ranks may change between calls, and have no Store of their own"
    return None


def transport_signature() -> tuple[str, ...]:
    """Return the inputs of decisions other than graph and options, for cache keys: backend, size and hosts of every group.

    A graph compiled over a fake group is invalid for a real one, and an all_reduce's node does not show its group's size. Nor
    does a name show whether the ranks are on one host. Hosts are numbered in each group, so that its ranks share graphs.
    """
    from ub_overlap import _torch_compat as compat

    return (*sorted(executor_devices()), *compat.groups(), "hosts", *world_hosts(), *_hosts_by_group())


def _hosts_by_group() -> list[str]:
    """Return "name: 0 0 1 1" for every group of this process, where there are several hosts."""
    from ub_overlap import _torch_compat as compat

    found = []
    for group in compat.process_groups() if world_hosts() else ():
        hosts = hosts_of(group.group_name)
        numbers = {host: str(number) for number, host in enumerate(dict.fromkeys(hosts))}
        found.append(f"{group.group_name}: {' '.join(numbers[host] for host in hosts)}")
    return sorted(found)
