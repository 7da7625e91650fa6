"""The float8 casts of weights that this process keeps. They go with the memory of their weight."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from ..threads import apart
from .cast import Cast, by_kernel, made

_LOCK = threading.Lock()
_BY_STORAGE: dict[int, dict[tuple[Any, ...], Cast]] = {}


def find(weight: Tensor, through: torch.dtype, axis: int | None) -> Cast | None:
    casts = _BY_STORAGE.get(compat.storage_id(weight))
    return None if casts is None else casts.get(_key(weight, through, axis))


def add(weight: Tensor, through: torch.dtype, axis: int | None) -> Cast:
    """Memory for a weight that is not found."""
    stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
    plain = weight.detach()

    def body() -> Cast:
        # On a thread of its own: no mode of the caller's, and no memory pool of a graph that is to be recorded.
        with torch.cuda.stream(stream):
            return made(plain, axis)

    cast = apart("ub_overlap fp8 weight", body).result()
    cast.stream = stream
    with _LOCK:
        storage = weight.untyped_storage()
        number = compat.storage_id(weight)
        if number not in _BY_STORAGE:
            _BY_STORAGE[number] = {}
            gone = weakref.finalize(storage, _forget, number)
            gone.atexit = False  # type: ignore[attr-defined]
        return _BY_STORAGE[number].setdefault(_key(weight, through, axis), cast)


def follow(cast: Cast, weight: Tensor, through: torch.dtype, axis: int | None) -> None:
    """Lets the current stream wait for the one that used `cast` last, and C++ find it there."""
    stream = torch.cuda.current_stream(weight.device)
    if cast.stream is not None and cast.stream != stream:
        stream.wait_stream(cast.stream)
    cast.stream = stream
    if by_kernel(weight):
        torch.ops.ub_overlap.fp8_weight_keep.default(weight, through, axis, cast.q, cast.scale, cast.known, cast.scratch)


def kept_bytes() -> int:
    """Memory that all casts take, in bytes."""
    tensors = [t for casts in list(_BY_STORAGE.values()) for c in casts.values() for t in (c.q, c.scale, c.scratch, c.was)]
    return sum(t.nbytes for t in tensors if t is not None)


def _key(weight: Tensor, through: torch.dtype, axis: int | None) -> tuple[Any, ...]:
    return weight.storage_offset(), weight.shape, weight.dtype, through, axis


def _forget(number: int) -> None:
    if hasattr(torch.ops.ub_overlap, "fp8_weight_forget"):
        torch.ops.ub_overlap.fp8_weight_forget.default(number)
    for cast in _BY_STORAGE.pop(number, {}).values():
        if cast.stream is not None:
            for tensor in (cast.q, cast.scale, cast.known, cast.scratch):
                tensor.record_stream(cast.stream)
