"""The float8 casts of weights that this process keeps. They go with the memory of their weight."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from ...session.daemon_thread import run_in_daemon_thread
from .weight_cast import CachedCast, by_kernel, made

_LOCK = threading.Lock()
_BY_STORAGE: dict[int, dict[tuple[Any, ...], CachedCast]] = {}


def find(weight: Tensor, through: torch.dtype, axis: int | None) -> CachedCast | None:
    casts = _BY_STORAGE.get(compat.storage_id(weight))
    return None if casts is None else casts.get(_key(weight, through, axis))


def add(weight: Tensor, through: torch.dtype, axis: int | None) -> CachedCast:
    """Memory for a weight that is not found; C++ keeps that of CUDA."""
    stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
    plain = weight.detach()

    def body() -> CachedCast:
        # On a thread of its own: no mode of the caller's, and no memory pool of a graph that is to be recorded.
        with torch.cuda.stream(stream):
            return made(plain, axis)

    cast = run_in_daemon_thread("ub_overlap fp8 weight", body).result()
    number = compat.storage_id(weight)
    with _LOCK:
        casts = _BY_STORAGE.get(number)
        if casts is None:
            casts = _BY_STORAGE[number] = {}
            gone = weakref.finalize(weight.untyped_storage(), _forget, number)
            gone.atexit = False  # type: ignore[attr-defined]
        if not by_kernel(weight):
            return casts.setdefault(_key(weight, through, axis), cast)
    torch.ops.ub_overlap.fp8_weight_keep.default(weight, through, axis, cast.q, cast.scale, cast.known, cast.scratch)
    return cast


def kept_bytes() -> int:
    """Memory that the casts of the CPU's weights take, in bytes."""
    tensors = [t for casts in list(_BY_STORAGE.values()) for c in casts.values() for t in (c.q, c.scale, c.scratch, c.was)]
    return sum(t.nbytes for t in tensors if t is not None)


def _key(weight: Tensor, through: torch.dtype, axis: int | None) -> tuple[Any, ...]:
    return weight.storage_offset(), weight.shape, weight.dtype, through, axis


def _forget(number: int) -> None:
    _BY_STORAGE.pop(number, None)
    if hasattr(torch.ops.ub_overlap, "fp8_weight_forget"):
        torch.ops.ub_overlap.fp8_weight_forget.default(number)
