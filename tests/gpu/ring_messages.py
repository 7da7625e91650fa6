"""A message of every rank to the next one, as a case for tests/gpu/cases.py: the calls of a pipeline's stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import ub_overlap
from ub_overlap import _torch_compat as compat

if TYPE_CHECKING:
    from .cases import Case

MESSAGE = "message"


def message(x: Tensor) -> Case:
    """Return the case of a ring of messages, each of the sizes of `x`."""
    return MESSAGE, (x,)


def pass_on(case: Case, group: str) -> list[Tensor]:
    """Send the tensor to the next rank, and return that of the rank before."""
    (x,) = case[1]
    members = compat.group_of(group)
    rank, ranks = members.rank(), members.size()
    out = torch.empty_like(x)
    sent = ub_overlap.isend(x, group=group, group_dst=(rank + 1) % ranks)
    ub_overlap.recv(out, group=group, group_src=(rank - 1) % ranks)
    sent.wait()
    return [out]
