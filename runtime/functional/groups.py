"""The group argument of the functions that torch.compile can trace: its name, size and device."""

from __future__ import annotations

import torch

from ub_overlap import _torch_compat

from ..session import group_argument
from ..session.group_argument import Group as Group

name_of = torch.compiler.assume_constant_result(group_argument.name_of)


@torch.compiler.assume_constant_result
def size_of(name: str) -> int:
    """Return the number of ranks of the group `name`."""
    return int(_torch_compat.group_of(name).size())


def device_of(name: str) -> torch.device:
    """Return the device of a group's tensors by its backend: the current GPU, else the CPU."""
    if torch.cuda.is_available() and "cuda" in _torch_compat.device_types(_torch_compat.group_of(name)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
