"""The cached weights of this process. They are evicted with the storage of their weight."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from ...session.daemon_thread import run_in_daemon_thread
from .weight_cast import FORMAT, CachedWeight, allocate, has_kernel

_LOCK = threading.Lock()
_BY_STORAGE: dict[int, dict[tuple[Any, ...], CachedWeight]] = {}


def find(weight: Tensor, round_to: torch.dtype, axis: int | None) -> CachedWeight | None:
    """Return the cached cast of `weight`, or None."""
    casts = _BY_STORAGE.get(compat.storage_id(weight))
    return None if casts is None else casts.get(_key(weight, round_to, axis))


def insert(weight: Tensor, round_to: torch.dtype, axis: int | None, siblings: Sequence[Tensor] = ()) -> CachedWeight:
    """Allocate and insert a cast for a weight that is not cached. C++ holds those of CUDA.

    `siblings`: weights, `weight` among them, whose casts are allocated together. Where one is cached, `weight` gets memory of
    its own: its part of new memory for all would not lie next to that cast.
    """
    stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
    own, *places = ((compat.storage_id(w), _key(w, round_to, axis)) for w in (weight, *siblings))
    if own not in places or any(find(w, round_to, axis) is not None for w in siblings):
        siblings, places = [weight], [own]
    weights = [w.detach() for w in siblings]

    def body() -> list[CachedWeight]:
        # On a separate thread: outside of the caller's modes and of the memory pool of a graph that is about to be captured.
        with torch.cuda.stream(stream):
            return allocate(weights, axis)

    allocated = run_in_daemon_thread("ub_overlap fp8 weight", body).result()
    with _LOCK:  # siblings are inserted together
        found = [_insert(w, round_to, axis, cached) for w, cached in zip(siblings, allocated, strict=True)]
    return found[places.index(own)]


def _insert(weight: Tensor, round_to: torch.dtype, axis: int | None, cached: CachedWeight) -> CachedWeight:
    """Insert a cast and return it, or the one that the weight has."""
    storage = compat.storage_id(weight)
    casts = _BY_STORAGE.get(storage)
    if casts is None:
        casts = _BY_STORAGE[storage] = {}
        finalizer = weakref.finalize(weight.untyped_storage(), _evict, storage)
        finalizer.atexit = False  # type: ignore[attr-defined]
    inserted = casts.setdefault(_key(weight, round_to, axis), cached)
    if has_kernel(weight):
        memory = inserted.q, inserted.scale, inserted.checksum, inserted.scratch
        torch.ops.ub_overlap.fp8_cached_weight_insert.default(weight, round_to, axis, *memory)
    return inserted


def insert_transposed(weight: Tensor, round_to: torch.dtype, axis: int | None) -> None:
    """Allocate and insert a transposed copy of a cast that C++ caches."""
    rows, cols = weight.shape
    stream = torch.cuda.current_stream(weight.device)

    def body() -> Tensor:
        with torch.cuda.stream(stream):  # on a separate thread, as in `insert`
            return torch.empty(cols, rows, dtype=FORMAT, device=weight.device)

    transposed = run_in_daemon_thread("ub_overlap fp8 weight", body).result()
    torch.ops.ub_overlap.fp8_cached_weight_insert_transposed.default(weight, round_to, axis, transposed)


def _key(weight: Tensor, round_to: torch.dtype, axis: int | None) -> tuple[Any, ...]:
    return weight.storage_offset(), weight.shape, weight.dtype, round_to, axis


def _evict(storage: int) -> None:
    _BY_STORAGE.pop(storage, None)
    if hasattr(torch.ops.ub_overlap, "fp8_cached_weight_evict"):
        torch.ops.ub_overlap.fp8_cached_weight_evict.default(storage)
