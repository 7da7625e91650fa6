"""all_gather, reduce_scatter, all_reduce, all_to_all: collectives of eager code that return early (`async_op=True`).

    handle = ub_overlap.all_gather(shard, group, async_op=True)     pushes begin
    ...                                                             anything else, other calls of the group too
    gathered = handle.wait()                                        waits for the peers' data

They have no gradients. They are the split collectives of compiled graphs: start_collective and finish_collective, or
start_all_to_all and finish_all_to_all. Compiled graphs may run in between: handles have the last slots, plans assign them from
0 up. A plan that needs those too finds them in use (OptionError).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from .. import ops  # noqa: F401  (registers the ops)
from ..schedule.steps import HANDLE_SLOTS
from . import layout
from .groups import Group, name_of, size_of
from .layout import DTYPES, Caller

OPS = torch.ops.ub_overlap
_BYTES = torch.float8_e4m3fn
"""A gather of other dtypes moves bytes, as which float8 is sent."""
_open: weakref.WeakKeyDictionary[Any, dict[int, CollectiveHandle]] = weakref.WeakKeyDictionary()
"""By process group and split slot. Handles are held here, so that one that is dropped still has its slot."""


class CollectiveHandle:
    """A collective that was started. `wait` returns its result. All ranks start and wait in the same order."""

    def __init__(
        self, call: Caller, group: str, input: Tensor, arguments: tuple[Any, ...], view_as: torch.dtype, op: str = "collective"
    ) -> None:
        """Start the collective by the ops start_`op` and finish_`op`. `arguments`: theirs between tensors and slot."""
        self._call, self._input, self._view_as = call, input, view_as
        self._result: Tensor | None = None
        self._slots = _open.setdefault(compat.group_of(group), {})
        self._slot = self._free_slot()
        zero_copy = (False,) if op == "collective" else ()
        self._arguments = (*arguments, self._slot, *zero_copy, "bulk", group, call.site)
        self._finish = getattr(OPS, f"finish_{op}")
        self._token = getattr(OPS, f"start_{op}")(input, *self._arguments)
        self._slots[self._slot] = self

    def __repr__(self) -> str:
        state = "open" if self._result is None else "finished"
        return f"<{state} {self._call.function} at site '{self._call.site}'>"

    def wait(self) -> Tensor:
        """Wait for the collective and return its result. On a GPU the current stream waits, not the host."""
        if self._result is None:
            try:
                result = self._finish(self._token, self._input, *self._arguments)
            finally:
                self._slots.pop(self._slot, None)  # after an error the group is not used again
            self._result = result.view(self._view_as) if result.dtype != self._view_as else result
            del self._input, self._token
        return self._result

    def _free_slot(self) -> int:
        free = [slot for slot in HANDLE_SLOTS if slot not in self._slots]
        if not free:
            self._call.refuse(
                f"{len(self._slots)} collectives of the group are open",
                ", ".join(map(repr, self._slots.values())),
                "a free slot",
                "call wait() of one of them first, in the same order on all ranks",
            )
        return free[0]


@torch.compiler.disable
def all_gather(shard: Tensor, group: Group = None, *, async_op: bool = False, site: str | None = None) -> Any:
    """Gather [s, ..] of any dtype from R ranks. Return [R * s, ..], or with `async_op` a handle whose `wait()` returns that.

    The input must not be written before the wait. Two collectives of a group may be open, and finish in any order that is the
    same on all ranks. No gradients: OptionError for an input that needs one, unless under no_grad. site: a name for errors and
    statistics. Inside torch.compile use functional collectives, which the compiler starts early by itself.
    """
    call = layout.caller("all_gather", site)
    moves_bytes = shard.dtype not in DTYPES
    return _run(call, "all_gather", "sum", _as_bytes(call, shard) if moves_bytes else shard, shard.dtype, group, async_op)


@torch.compiler.disable
def reduce_scatter(
    full: Tensor,
    group: Group = None,
    *,
    reduce_op: str = "sum",
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    site: str | None = None,
) -> Any:
    """Sum [R * s, ..] over R ranks and return this rank's rows [s, ..], or a handle, as in `all_gather`.

    The sum is taken in fp32 in rank order and rounded once to `out_dtype` (None: that of `full`); "avg" divides it by R. Inputs
    are sent as they are: bf16 gradients summed to fp32 send half the bytes of fp32 ones.
    """
    call = layout.caller("reduce_scatter", site)
    ranks = size_of(name_of(group))
    if full.dim() and full.shape[0] % ranks:
        call.refuse("dim 0 cannot be scattered evenly", full.shape[0], f"a multiple of {ranks}, the group's ranks")
    return _run(call, "reduce_scatter", reduce_op, full, out_dtype or full.dtype, group, async_op)


@torch.compiler.disable
def all_reduce(
    x: Tensor,
    group: Group = None,
    *,
    reduce_op: str = "sum",
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    site: str | None = None,
) -> Any:
    """Return the sum of `x` over ranks, equal on all of them, or a handle, as in `all_gather`. `x` is not changed.

    reduce_op, out_dtype: as in `reduce_scatter`. The sums are sent in `out_dtype`.
    """
    return _run(layout.caller("all_reduce", site), "all_reduce", reduce_op, x, out_dtype or x.dtype, group, async_op)


@torch.compiler.disable
def all_to_all(
    input: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: Group = None,
    *,
    async_op: bool = False,
    site: str | None = None,
) -> Any:
    """Send each rank its rows of `input`, and return the rows that all ranks send to this one, or a handle, as in `all_gather`.

    `input_splits[d]`: rows for rank d, in rank order in the input. `output_splits[s]`: rows from rank s. Both may be 0; None
    means equal parts. They may differ between calls and ranks, if those of the two ranks of a piece agree. Any dtype.
    """
    call, name = layout.caller("all_to_all", site), name_of(group)
    ranks = size_of(name)
    _check_input(call, input)
    splits = []
    for label, rows_of_peers in (("output_splits", output_splits), ("input_splits", input_splits)):
        if rows_of_peers is None and input.shape[0] % ranks:
            call.refuse("dim 0 cannot be divided evenly", input.shape[0], f"a multiple of {ranks}, or {label}")
        splits.append([input.shape[0] // ranks] * ranks if rows_of_peers is None else [int(rows) for rows in rows_of_peers])
    sent = input.detach().contiguous()
    handle = CollectiveHandle(call, name, sent, tuple(splits), input.dtype, "all_to_all")
    return handle if async_op else handle.wait()


def _check_input(call: Caller, x: Tensor) -> None:
    if x.dim() == 0:
        call.refuse("the input has no dims", "0", "one or more")
    if layout.needs_autograd(x):
        call.refuse("the function has no gradient", "an input with requires_grad", "one without", "detach it, or use no_grad")


def _run(call: Caller, collective: str, reduce_op: str, x: Tensor, out_dtype: torch.dtype, group: Group, async_op: bool) -> Any:
    layout.check_choice(call, "reduce_op", reduce_op, ("sum", "avg"))
    _check_input(call, x)
    if collective != "all_gather" and not {x.dtype, out_dtype} <= set(DTYPES):
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        call.refuse("a dtype cannot be summed", f"{x.dtype} to {out_dtype}", expected)
    sent = x.detach().contiguous()
    handle = CollectiveHandle(call, name_of(group), sent, (collective, reduce_op, _op_dtype(sent, out_dtype)), out_dtype)
    return handle if async_op else handle.wait()


def _op_dtype(sent: Tensor, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the op's result: bytes stay bytes."""
    return sent.dtype if sent.dtype == _BYTES else out_dtype


def _as_bytes(call: Caller, shard: Tensor) -> Tensor:
    if shard.dim() == 0:
        call.refuse("the input has no dims", "0", "one or more")
    return shard.resolve_conj().contiguous().view(_BYTES)
