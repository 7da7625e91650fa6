"""Description of this machine: the key under which a device profile is stored, and by which it becomes invalid."""

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
"""Fields of a key. "ranks" is the size of the measured group; the others describe the machine."""


@lru_cache(maxsize=2)
def _machine(device: str) -> tuple[tuple[str, Any], ...]:
    import torch

    if device == "cpu":
        fields: dict[str, Any] = {
            "gpu": platform.machine(),
            "units": os.cpu_count() or 1,
            "torch": str(torch.__version__),
        }
    else:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        nccl: Any = None
        with contextlib.suppress(Exception):
            nccl = torch.cuda.nccl.version()
        fields = {
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
    return tuple({"device": device, **fields}.items())


def key(device: str, ranks: int) -> dict[str, Any]:
    """Return the key of this machine for a group of `ranks`. `device`: "cuda" or "cpu"."""
    return {**dict(_machine(device)), "ranks": ranks}


def differing_fields(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return the fields, except ranks, in which two keys differ."""
    return [name for name in KEY if name != "ranks" and first.get(name) != second.get(name)]


def device() -> str:
    """Return "cuda" where torch sees a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def properties() -> dict[str, Any]:
    """Return the current GPU's properties for an analytic profile."""
    import torch

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"name": gpu.name, "units": gpu.multi_processor_count, "capability": (gpu.major, gpu.minor)}


def cache_mib() -> float:
    """Return the last-level cache of the current GPU in MiB."""
    import torch

    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return float(round(getattr(gpu, "L2_cache_size", 0) / 2**20, 1))


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        version = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
        return version[1] if version else None
    return None


def _cublas() -> str | None:
    """Return the version of the cuBLAS package that torch depends on. A system cuBLAS is covered by the field "cuda"."""
    for name in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _topology() -> str:
    """Describe the links between the GPUs that this process sees."""
    import torch

    from ub_overlap import _torch_compat as compat

    count = torch.cuda.device_count()
    if count < 2:
        return "one GPU"
    with contextlib.suppress(Exception):
        links = compat.nvlinks()
        counts = [links[i][j] for i in range(count) for j in range(count) if i != j] if links else []
        if counts and max(counts) > 0:
            return f"nvlink x{min(counts)}"
    with contextlib.suppress(Exception):
        if all(torch.cuda.can_device_access_peer(i, j) for i in range(count) for j in range(count) if i != j):
            return "peer access"
    return "no peer access"
