"""Collect the metadata of a measurement: machine, versions, command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ub_overlap.tools.rank_process import RankProcess

ROOT = Path(__file__).resolve().parents[1]


def facts(world: RankProcess, module: str) -> dict[str, Any]:
    """Return metadata as JSON values, None if unknown. Collective: every rank reports its device."""
    from ub_overlap.runtime.extension import extension

    name = torch.cuda.get_device_name(world.device) if world.cuda else platform.processor() or platform.machine()
    nccl: Any = torch.cuda.nccl.version() if world.cuda else None
    launched = os.environ.get("WORLD_SIZE")
    launcher = f"torchrun --nproc-per-node {launched}" if launched else "python"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "ranks": world.ranks,
        "device": world.device.type,
        "devices": world.gather(name),
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
        if world.cuda
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "python": platform.python_version(),
        "commit": _output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "dirty": _has_changes(),
        "build": {key: str(value) for key, value in extension().build_info().items()},
        "max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "command": f"{launcher} -m {module} {' '.join(sys.argv[1:])}".strip(),
    }


def write(path: str | Path, document: dict[str, Any]) -> None:
    """Replace `path` atomically, so an interrupted run keeps its rows."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(target.suffix + ".part")
    part.write_text(json.dumps(rounded(document), indent=1) + "\n")
    part.replace(target)


def rounded(value: Any) -> Any:
    """Return `value` with floats rounded to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _has_changes() -> bool | None:
    status = _output_of("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


def _output_of(*command: str) -> str | None:
    """Return the output of a command, None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
