"""Checks of `doctor` that need torch or GPUs, in a separate process. As a program it prints one JSON line per finding.

Every check is guarded: a failure becomes a finding under the check's name. Lines printed before a crash remain valid.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

PACKAGES = ("torch", "triton", "tabulate", "rich", "msgspec", "jinja2", "numpy", "matplotlib", "transformers", "torchtitan")


def packages() -> dict[str, str | None]:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in PACKAGES}


def torch_build() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    available = dist.is_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "distributed": available,
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available(),
    }


def devices() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    capabilities = [".".join(map(str, torch.cuda.get_device_capability(i))) for i in range(count)]
    peers = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    return {"count": count, "names": names, "capabilities": capabilities, "peers": peers}


def nvlink() -> dict[str, Any]:
    from ub_overlap import _torch_compat as compat

    return {"links": compat.nvlinks()}


def symmetric() -> dict[str, Any]:
    from ub_overlap import _torch_compat as compat

    return {"there": compat._SymmetricMemory is not None}


def extension() -> dict[str, Any]:
    from ub_overlap.runtime.extension import cuda_note
    from ub_overlap.runtime.extension import extension as load

    return {**load().build_info(), "cuda_note": cuda_note()}


def private_names() -> dict[str, Any]:
    """Return the private names that an unsupported torch lacks. Supported versions are skipped: the check takes seconds."""
    import torch

    from ub_overlap import _torch_compat as compat
    from ub_overlap._versions import is_supported_torch

    missing: list[str] = []
    if is_supported_torch(str(torch.__version__)):
        return {"missing": missing}
    for name in compat.names():
        try:
            getattr(compat, name)
        except ImportError:
            missing.append(name)
    return {"missing": missing}


def profile() -> dict[str, Any]:
    from ub_overlap.compiler.cost.profile_lookup import load

    return {"name": str(load(None))}


def settings() -> dict[str, Any]:
    """Return the settings that the environment gives."""
    from ub_overlap.runtime.settings import current

    return asdict(current())


CHECKS: dict[str, Callable[[], Any]] = {
    "packages": packages, "torch": torch_build, "devices": devices, "nvlink": nvlink, "symmetric": symmetric,
    "extension": extension, "private_names": private_names, "profile": profile, "settings": settings,
}  # fmt: skip


def main() -> None:
    for name, check in CHECKS.items():
        try:
            finding = {"name": name, "found": check()}
        except BaseException as error:  # noqa: BLE001  (any error is a finding)
            lines = str(error).splitlines()
            finding = {"name": name, "problem": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        print(json.dumps(finding, default=str), flush=True)


if __name__ == "__main__":
    main()
