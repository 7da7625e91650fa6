"""initialize_group: allocate a group's memory before its first step. check_errors: raise pending errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import errors
from ..session import bind, session
from ..site_id import SiteId
from .groups import Group, device_of, name_of

_SITE = "initialize"


def initialize_group(
    group: Group,
    bytes_or_shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Make the session of `group` and allocate its memory now, instead of in the first step. Collective over the group.

    `bytes_or_shape`: bytes of one slot, or the full shape of the largest gathered or scattered tensor with its `dtype`. For
    sequence parallelism that is [tokens, hidden]; an all_reduce needs twice that. A rank has two slots. Where ranks request
    different sizes, the largest counts. Slots never shrink: smaller requests change nothing.
    `device`: device of the tensors, by default that of the group's backend.

    Return the bytes of a slot that calls can use without growth; 0 where none are needed (one rank, or plain c10d). Raise
    OptionError for an invalid size, and PeerTimeoutError for ranks that do not arrive.
    """
    needed = _slot_bytes(bytes_or_shape, dtype)
    name = name_of(group)
    where = torch.device(device) if device is not None else device_of(name)
    if where.type == "cuda":
        from ..session import symm_mem

        symm_mem.refuse_capture(f"initialize group '{name}'")
    scalar = torch.zeros(1, device=where)
    bind.request_slot_bytes(name, where.type, needed)
    # The first call has no plan: it binds the group where that has not been done. The second reserves, in step with all ranks.
    try:
        torch.ops.ub_overlap.bulk(scalar, [], [], "all_gather", "sum", scalar.dtype, "bulk", name, str(SiteId("", _SITE)))
    finally:
        bind.clear_request(name, where.type)
    own = bind.find_session(name, where.type)
    assert own is not None, "the op above has bound the group"
    digest = own.reserve(needed)
    torch.ops.ub_overlap.bulk(scalar, [], [], "all_gather", "sum", scalar.dtype, "bulk", name, str(SiteId(digest, _SITE)))
    return own.slot_bytes


def check_errors(group: Group = None) -> None:
    """Raise the pending error of `group`, or of any group of this process where it is None.

    GPU calls are asynchronous. A failure is raised by the next op on the group or by this function, and logged.
    Call it after torch.cuda.synchronize() to cover all calls.
    """
    session.check(None if group is None else name_of(group))


def _slot_bytes(bytes_or_shape: int | Sequence[int], dtype: torch.dtype | None) -> int:
    def invalid(got: object, expected: str) -> errors.OptionError:
        return errors.OptionError("invalid size", where="ub_overlap.initialize_group", got=str(got), expected=expected)

    if isinstance(bytes_or_shape, int):
        if isinstance(bytes_or_shape, bool) or bytes_or_shape < 1:
            raise invalid(bytes_or_shape, "bytes, 1 or more")
        return bytes_or_shape
    sizes = tuple(bytes_or_shape)
    if not sizes or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
        raise invalid(sizes, "a shape with sizes of 1 or more")
    if not isinstance(dtype, torch.dtype):
        raise invalid(f"shape {list(sizes)} with dtype {dtype!r}", "a dtype with the shape, e.g. torch.bfloat16")
    return math.prod(sizes) * dtype.itemsize
