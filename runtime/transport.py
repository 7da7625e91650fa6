"""Which groups the runtime can serve, as far as every rank can tell alike at compile time.

What only a look at the peers shows (ranks on several hosts, GPUs without peer access) is found when the group is bound, at its
first call.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1)
def executors() -> frozenset[str]:
    """Device types that this build has an executor for."""
    from .errors import BuildMismatchError

    try:
        from .ops import extension

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
    """What `why_not` depends on beside its arguments, for cache keys: a graph compiled over a fake group serves no real one."""
    import torch.distributed as dist

    backend = dist.get_backend() if dist.is_available() and dist.is_initialized() else "none"
    return (*sorted(executors()), backend)
