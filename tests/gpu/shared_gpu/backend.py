"""Build and register the c10d backend of ranks that share a GPU."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

SOURCE = Path(__file__).with_name("host_gloo.cpp")
NAME = "ub_overlap_host_gloo"


def register() -> str:
    """Build the backend once per user and version of torch (30 s), register it, and return its name."""
    if not hasattr(dist.Backend, NAME.upper()):
        wrap = _build().wrap

        def create(options: Any, _: Any) -> Any:
            store = dist.PrefixStore("host_gloo/", options.store)
            return wrap(dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout))

        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    return NAME


def _build() -> Any:
    from torch.utils import cpp_extension

    folder = Path(tempfile.gettempdir(), f"{NAME}.{os.getuid()}.{torch.__version__}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user, and code is loaded from it: remove it, or set TMPDIR")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # has ninja, as a build requirement
    with open(folder / "held", "w") as held, mock.patch.dict(os.environ, PATH=path):
        fcntl.flock(held, fcntl.LOCK_EX)  # unlike cpp_extension's own lock, it ends with the process that holds it
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(NAME, [str(SOURCE)], extra_cflags=["-O0"], build_directory=str(folder))
