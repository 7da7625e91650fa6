"""What a profile is measured on: the key under which it is kept, and by which it becomes invalid."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

KEY = ("device", "gpu", "units", "memory_gib", "driver", "cuda", "torch", "cublas", "nccl", "topology", "ranks")
"""Fields of a key; "ranks" is the size of the group that was measured, the others are the machine's."""


@lru_cache(maxsize=2)
def _machine(device: str) -> tuple[tuple[str, Any], ...]:
    import torch

    if device == "cpu":
        found: dict[str, Any] = {
            "gpu": platform.machine(),
            "units": os.cpu_count() or 1,
            "torch": str(torch.__version__),
        }
    else:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        nccl: Any = None
        with contextlib.suppress(Exception):
            nccl = torch.cuda.nccl.version()
        found = {
            "gpu": properties.name,
            "units": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30),
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "torch": str(torch.__version__),
            "cublas": _cublas(),
            "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
            "topology": _topology(),
        }
    return tuple({"device": device, **found}.items())


def key(device: str, ranks: int) -> dict[str, Any]:
    """The key of this machine for a group of `ranks`. `device`: "cuda" or "cpu"."""
    return {**dict(_machine(device)), "ranks": ranks}


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The fields, but for ranks, in which two keys differ."""
    return [name for name in KEY if name != "ranks" and one.get(name) != other.get(name)]


def device() -> str:
    """ "cuda" where torch sees a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def properties() -> dict[str, Any]:
    """What an analytic profile of the current GPU starts from."""
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"name": found.name, "units": found.multi_processor_count, "capability": (found.major, found.minor)}


def cache_mib() -> float:
    """Last-level cache of the current GPU."""
    import torch

    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return float(round(getattr(found, "L2_cache_size", 0) / 2**20, 1))


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else None
    return None


def _cublas() -> str | None:
    """The version of the package that torch brings; a system's own cuBLAS is told by "cuda"."""
    for name in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _topology() -> str:
    """How the GPUs that this process sees reach each other."""
    import torch

    from ub_overlap import _torch_compat as compat

    count = torch.cuda.device_count()
    if count < 2:
        return "one GPU"
    with contextlib.suppress(Exception):
        links = compat.nvlinks()
        between = [links[i][j] for i in range(count) for j in range(count) if i != j] if links else []
        if between and max(between) > 0:
            return f"nvlink x{min(between)}"
    with contextlib.suppress(Exception):
        if all(torch.cuda.can_device_access_peer(i, j) for i in range(count) for j in range(count) if i != j):
            return "peer access"
    return "no peer access"
