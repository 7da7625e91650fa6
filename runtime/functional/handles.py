"""all_gather, reduce_scatter, all_reduce, all_to_all: collectives of eager code that return early (`async_op=True`).

    handle = ub_overlap.all_gather(shard, group, async_op=True)     pushes begin
    ...                                                             anything else, other calls of the group too
    gathered = handle.wait()                                        waits for the peers' data

They have no gradients. They are the split collectives of compiled graphs: start_collective and finish_collective, or
start_all_to_all and finish_all_to_all. Compiled graphs may run in between: handles have split slots of their own.

A handle that is dropped without a wait keeps its slot until a start finds all slots in use. If the collective started first was
dropped, that start finishes it, with a warning. Which one that is follows from the program alone, not from when Python frees
handles, so all ranks finish it at the same place.

An exception between start and wait drops the handle, too. If it is raised on all ranks, the group goes on. If some ranks have
waited, the slots of later calls differ: an error at the deadline, with a note that names the dropped handle.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from .. import (
    errors,
    ops,  # noqa: F401  (registers the ops)
)
from ..schedule.steps import HANDLE_SLOTS
from . import layout
from .groups import Group, name_of, size_of
from .layout import DTYPES, Caller, Tensors

OPS = torch.ops.ub_overlap
_BYTES = torch.float8_e4m3fn
"""A gather of other dtypes moves bytes, as which float8 is sent."""
log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


def _untraced(function: Function) -> Function:
    """Apply torch.compiler.disable, whose type does not keep the signature."""
    disabled: Function = torch.compiler.disable(function)
    return disabled


@dataclass(slots=True)
class _OpenCollective:
    """A collective between start and finish. It lives longer than a handle that is dropped."""

    call: Caller
    line: str
    """Where the program started it."""
    finish: Callable[[], Any]
    """Its finish. It keeps the input, which the pushes read."""
    handle: weakref.ref[CollectiveHandle[Any]] | None = None

    @property
    def is_dropped(self) -> bool:
        return self.handle is not None and self.handle() is None

    def __str__(self) -> str:
        dropped = ", and dropped without wait()" if self.is_dropped else ""
        return f"{self.call.function} at site '{self.call.site}', started by {self.line}{dropped}"


_open: weakref.WeakKeyDictionary[Any, dict[int, _OpenCollective]] = weakref.WeakKeyDictionary()
"""By process group and split slot, in the order of their starts."""


class CollectiveHandle(Generic[Tensors]):
    """A collective that was started. `wait` returns its result. All ranks start and wait in the same order."""

    def __init__(
        self, call: Caller, group: str, op: str, input: Tensor | list[Tensor], arguments: tuple[Any, ...], view_as: Any
    ) -> None:
        """Start the collective by the ops start_`op` and finish_`op`. `arguments`: theirs between tensors and slot.

        `view_as`: the dtype of the result, or a list of them.
        """
        self._call, self._view_as = call, view_as
        self._result: Any = None
        self._slots = _open.setdefault(compat.group_of(group), {})
        self._slot = _take_slot(self._slots, call)
        all_arguments = (*arguments, self._slot, False, "bulk", group, call.site)  # no zero_copy, no one_area
        with _name_dropped(self._slots):
            token = getattr(OPS, f"start_{op}")(input, *all_arguments)
        sent = [input] if isinstance(input, Tensor) else input
        started_on = _current_stream(sent[0])

        def finish() -> Any:
            if (stream := _current_stream(sent[0])) != started_on:
                for tensor in sent:  # the pushes, which read it, end before this stream goes on
                    tensor.record_stream(stream)
            return getattr(OPS, f"finish_{op}")(token, input, *all_arguments)

        self._slots[self._slot] = _OpenCollective(call, _calling_line(), finish, weakref.ref(self))

    def __repr__(self) -> str:
        state = "open" if self._result is None else "finished"
        return f"<{state} {self._call.function} at site '{self._call.site}'>"

    def wait(self) -> Tensors:
        """Wait for the collective and return its result, a list for a list. On a GPU the stream waits, not the host."""
        if self._result is None:
            own = self._slots.pop(self._slot, None)  # also where it fails: after an error the group is not used again
            if own is None:
                self._call.refuse("the collective has failed in an earlier wait", "a second wait", "one")
            with _name_dropped(self._slots):
                received = own.finish()
            if isinstance(received, Tensor):
                self._result = _view(received, self._view_as)
            else:
                self._result = [_view(one, dtype) for one, dtype in zip(received, self._view_as, strict=True)]
        return cast(Tensors, self._result)


@contextlib.contextmanager
def _name_dropped(slots: dict[int, _OpenCollective]) -> Iterator[None]:
    """Add notes to an error of ranks that do not meet: this rank may have dropped a handle alone."""
    try:
        yield
    except errors.RankError as error:
        for one in slots.values():
            if one.is_dropped:
                error.add_note(f"{one}. Ranks that have waited for it use its slot for other calls.")
        raise


def _current_stream(tensor: Tensor) -> Any:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def _view(result: Tensor, dtype: torch.dtype) -> Tensor:
    return result.view(dtype) if result.dtype != dtype else result


def _take_slot(slots: dict[int, _OpenCollective], call: Caller) -> int:
    """Return a free slot. OptionError where all are in use and the one taken first has a handle."""
    free = [slot for slot in HANDLE_SLOTS if slot not in slots]
    if free:
        return free[0]
    slot, first = next(iter(slots.items()))
    if not first.is_dropped:
        gc.collect()  # a cycle may hold its handle
    if not first.is_dropped:
        call.refuse(
            f"{len(slots)} collectives of the group are open",
            "; ".join(map(str, slots.values())),
            "a free slot",
            "call wait() of the first one before, in the same order on all ranks",
        )
    log.warning("%s: its slot is needed, so it is finished now. Call wait() of every handle.", first)
    del slots[slot]
    first.finish()
    return slot


def _calling_line() -> str:
    """Return "file:line" of the program that calls a function of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("ub_overlap", "torch"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@overload
def all_gather(
    shard: Tensors, group: Group = None, *, async_op: Literal[False] = False, site: str | None = None
) -> Tensors: ...
@overload
def all_gather(
    shard: Tensors, group: Group = None, *, async_op: Literal[True], site: str | None = None
) -> CollectiveHandle[Tensors]: ...
@_untraced
def all_gather(
    shard: Tensor | Sequence[Tensor], group: Group = None, *, async_op: bool = False, site: str | None = None
) -> Any:
    """Gather [s, ..] of any dtype from R ranks. Return [R * s, ..], or with `async_op` a handle whose `wait()` returns that.

    Several tensors, of any sizes and dtypes, are gathered by one collective. The result is then a list.

    The input must not be written before the wait. Four collectives of a group may be open, and finish in any order that is the
    same on all ranks. No gradients: OptionError for an input that needs one, unless under no_grad. site: a name for errors and
    statistics. Inside torch.compile use functional collectives, which the compiler starts early by itself.
    """
    call = layout.caller("all_gather", site)
    return _run(call, "all_gather", "sum", shard, None, group, async_op)


@overload
def reduce_scatter(
    full: Tensors,
    group: Group = None,
    *,
    reduce_op: str = "sum",
    out_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
    site: str | None = None,
) -> Tensors: ...
@overload
def reduce_scatter(
    full: Tensors,
    group: Group = None,
    *,
    reduce_op: str = "sum",
    out_dtype: torch.dtype | None = None,
    async_op: Literal[True],
    site: str | None = None,
) -> CollectiveHandle[Tensors]: ...
@_untraced
def reduce_scatter(
    full: Tensor | Sequence[Tensor],
    group: Group = None,
    *,
    reduce_op: str = "sum",
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    site: str | None = None,
) -> Any:
    """Sum [R * s, ..] over R ranks and return this rank's rows [s, ..], or a handle, as in `all_gather`.

    The sum is taken in fp32 in rank order and rounded once to `out_dtype` (None: that of `full`); "avg" divides it by R. Inputs
    are sent as they are: bf16 gradients summed to fp32 send half the bytes of fp32 ones. A list gives a list, as in
    `all_gather`.
    """
    call = layout.caller("reduce_scatter", site)
    ranks = size_of(name_of(group))
    for tensor in [full] if isinstance(full, Tensor) else full:
        if tensor.dim() and tensor.shape[0] % ranks:
            call.refuse("dim 0 cannot be scattered evenly", tensor.shape[0], f"a multiple of {ranks}, the group's ranks")
    return _run(call, "reduce_scatter", reduce_op, full, out_dtype, group, async_op)


@overload
def all_reduce(
    x: Tensors,
    group: Group = None,
    *,
    reduce_op: str = "sum",
    out_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
    site: str | None = None,
) -> Tensors: ...
@overload
def all_reduce(
    x: Tensors,
    group: Group = None,
    *,
    reduce_op: str = "sum",
    out_dtype: torch.dtype | None = None,
    async_op: Literal[True],
    site: str | None = None,
) -> CollectiveHandle[Tensors]: ...
@_untraced
def all_reduce(
    x: Tensor | Sequence[Tensor],
    group: Group = None,
    *,
    reduce_op: str = "sum",
    out_dtype: torch.dtype | None = None,
    async_op: bool = False,
    site: str | None = None,
) -> Any:
    """Return the sum of `x` over ranks, equal on all of them, or a handle, as in `all_gather`. `x` is not changed.

    reduce_op, out_dtype: as in `reduce_scatter`. The sums are sent in `out_dtype`. A list gives a list, as in `all_gather`.
    """
    return _run(layout.caller("all_reduce", site), "all_reduce", reduce_op, x, out_dtype, group, async_op)


@overload
def all_to_all(
    input: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: Group = None,
    *,
    async_op: Literal[False] = False,
    site: str | None = None,
) -> Tensor: ...
@overload
def all_to_all(
    input: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: Group = None,
    *,
    async_op: Literal[True],
    site: str | None = None,
) -> CollectiveHandle[Tensor]: ...
@_untraced
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
    sent = _dense(input)
    handle: CollectiveHandle[Tensor] = CollectiveHandle(call, name, "all_to_all", sent, tuple(splits), input.dtype)
    return handle if async_op else handle.wait()


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor's numbers as they are read, contiguous: a view may conjugate or negate those in memory.

    A dim of one element may have any stride in a contiguous tensor. Bytes are viewed only where the last one is 1.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense if dense.stride(-1) == 1 else dense.clone(memory_format=torch.contiguous_format)


def _check_input(call: Caller, x: Tensor) -> None:
    if x.dim() == 0:
        call.refuse("the input has no dims", "0", "one or more")
    if layout.needs_autograd(x):
        call.refuse("the function has no gradient", "an input with requires_grad", "one without", "detach it, or use no_grad")


def _run(
    call: Caller,
    collective: str,
    reduce_op: str,
    x: Tensor | Sequence[Tensor],
    out_dtype: torch.dtype | None,
    group: Group,
    async_op: bool,
) -> Any:
    layout.check_choice(call, "reduce_op", reduce_op, ("sum", "avg"))
    tensors = [x] if isinstance(x, Tensor) else list(x)
    if not tensors:
        call.refuse("no input", "an empty list", "one tensor or more")
    sent, dtypes = [], [out_dtype or tensor.dtype for tensor in tensors]
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        _check_input(call, tensor)
        if tensor.device != tensors[0].device:
            call.refuse("the inputs are on several devices", tensor.device, tensors[0].device)
        if collective != "all_gather" and not {tensor.dtype, dtype} <= set(DTYPES):
            expected = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            call.refuse("a dtype cannot be summed", f"{tensor.dtype} to {dtype}", expected)
        dense = _dense(tensor)
        sent.append(dense if dense.dtype in DTYPES else dense.view(_BYTES))
    op_dtypes = [one.dtype if one.dtype == _BYTES else dtype for one, dtype in zip(sent, dtypes, strict=True)]
    handle: CollectiveHandle[Any]
    if isinstance(x, Tensor):
        handle = CollectiveHandle(call, name_of(group), "collective", sent[0], (collective, reduce_op, op_dtypes[0]), dtypes[0])
    else:
        handle = CollectiveHandle(call, name_of(group), "coalesced", sent, (collective, reduce_op, op_dtypes), dtypes)
    return handle if async_op else handle.wait()
