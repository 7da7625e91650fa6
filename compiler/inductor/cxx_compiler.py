"""Check that Inductor finds its C++ compiler before it needs one: its own error comes late and with a traceback of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.errors import UbOverlapError


def require_cxx_compiler(inputs: Iterable[Any], options: dict[str, Any]) -> None:
    """Raise UbOverlapError if a graph with these inputs is compiled for CPUs and there is no C++ compiler.

    `options`: Inductor's. Its option cpp.cxx names the compilers, by default CXX or g++.
    """
    if not any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in inputs):
        return
    found = compat.inductor_option("cpp.cxx", options)
    names = [name for name in ([found] if isinstance(found, str) else found or ()) if name]
    if not names or any(map(shutil.which, names)) or os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        return
    raise UbOverlapError(
        what="no C++ compiler: Inductor compiles for CPUs with one",
        where="torch.compile(..., backend='ub_overlap')",
        got=f"{' or '.join(names)} is not on PATH",
        expected="g++, or another compiler that the environment variable CXX names",
        fix="apt install g++, or export CXX=clang++; options={'inner': 'aot_eager'} needs no compiler",
    )
