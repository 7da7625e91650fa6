"""Which groups the runtime can serve, as far as every rank can tell alike at compile time.

What only a look at the peers shows (ranks on several hosts, GPUs without peer access) is found when the group is bound, at its
first call.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1)
def executors() -> frozenset[str]:
    """Device types that this build has an executor for."""
    from ..errors import BuildMismatchError

    try:
        from ..extension import extension

        return frozenset({"cpu", "cuda"} if extension().build_info()["cuda"] else {"cpu"})
    except BuildMismatchError:  # a build for looking at graphs
        return frozenset({"cpu"})


def why_not(device: str, group: str, ranks: int) -> str | None:
    """Why a group of `ranks` ranks cannot be served on tensors of `device`, or None where it can."""
    from ub_overlap import _torch_compat as compat

    if device not in executors():
        return f"this build has no executor for {device} tensors (it has: {', '.join(sorted(executors()))})"
    if compat.is_fake_group(group):
        return "the group is a fake process group: its ranks do not exist"
    return None


def signature() -> tuple[str, ...]:
    """What decisions depend on beside graph and options, for cache keys: backend and size of every group. A graph compiled over
    a fake group serves no real one, and an all_reduce's node does not tell how many ranks its group has."""
    from ub_overlap import _torch_compat as compat

    return (*sorted(executors()), *compat.groups())
