"""initialize_group: allocate a group's memory before its first step. check_errors: raise failures of earlier calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import errors
from ..session import session
from ..site_id import SiteId
from .groups import Group, device_of, name_of

_SITE = "initialize"


def initialize_group(
    group: Group,
    bytes_or_shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Makes the session of `group` and its memory now, so that the first step brings no surprise. Collective over the group.

    `bytes_or_shape`: bytes of one slot, or the shape of the largest tensor that is gathered or scattered, whole, with its
    `dtype`: for sequence parallelism [tokens, hidden] (an all_reduce needs twice that). A rank has two slots. Where ranks bring
    different sizes the largest counts; what is there already is kept, and smaller requests change nothing.
    `device`: where the tensors will lie; by default what the group's backend serves.

    Returns the bytes of a slot that calls may now use without growth; 0 where none are needed (one rank, or no transport of
    ours). OptionError for a size that cannot be, PeerTimeoutError for ranks that do not come.
    """
    needed = _bytes(bytes_or_shape, dtype)
    name = name_of(group)
    where = torch.device(device) if device is not None else device_of(name)
    if where.type == "cuda":
        from ..session import symm_mem

        symm_mem.refuse_capture(f"initialize group '{name}'")
    little = torch.zeros(1, device=where)
    session.want(name, where.type, needed)
    # Without a plan: binds the group where that has not been done. Then a call that reserves, in step with the other ranks.
    try:
        torch.ops.ub_overlap.bulk(little, [], [], "all_gather", "sum", "bulk", name, str(SiteId("", _SITE)))
    finally:
        session.unwant(name, where.type)
    mine = session.bound(name, where.type)
    assert mine is not None, "the op above has bound the group"
    digest = mine.reserve(needed)
    torch.ops.ub_overlap.bulk(little, [], [], "all_gather", "sum", "bulk", name, str(SiteId(digest, _SITE)))
    return mine.slot_bytes


def check_errors(group: Group = None) -> None:
    """Raises what has gone wrong so far in `group`, or in any group of this process where it is None.

    On CUDA a call returns before its peers have come: what fails then shows at the next op of the group, in the log, or here.
    After torch.cuda.synchronize() it knows of all calls."""
    session.check(None if group is None else name_of(group))


def _bytes(bytes_or_shape: int | Sequence[int], dtype: torch.dtype | None) -> int:
    def refuse(got: object, expected: str) -> errors.OptionError:
        return errors.OptionError("this is no size", where="ub_overlap.initialize_group", got=str(got), expected=expected)

    if isinstance(bytes_or_shape, int):
        if isinstance(bytes_or_shape, bool) or bytes_or_shape < 1:
            raise refuse(bytes_or_shape, "bytes, 1 or more")
        return bytes_or_shape
    sizes = tuple(bytes_or_shape)
    if not sizes or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
        raise refuse(sizes, "a shape of sizes of 1 or more")
    if not isinstance(dtype, torch.dtype):
        raise refuse(f"shape {list(sizes)} with dtype {dtype!r}", "a dtype beside a shape, e.g. torch.bfloat16")
    return math.prod(sizes) * dtype.itemsize
