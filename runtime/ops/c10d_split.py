"""Split collectives that c10d runs: start launches the collective asynchronously, finish waits for it.

NCCL runs it on a stream of its own, gloo on threads of its own, so it is concurrent with what runs in between. Groups across
hosts run this way, and sites whose strategy is "none".

    start    widen the input to out_dtype, allocate the result, launch, keep work and tensors under the slot
    finish   wait: NCCL lets the current stream wait, gloo the host; then divide for "avg" and cast

A collective whose token is freed has no finish, as after an exception. The next start of its slot ends it, on all ranks.

Gathers of float8 and all exchanges (all_to_all) move bytes: backends lack some dtypes.

Sums are taken in the wider of both dtypes, as the graph before the rewrite took them. A CUDA graph captures both halves: the
tensors are in its memory pool, the collective is one of its nodes, and a replay runs no Python.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from .. import errors
from ..fp8.numerics import FLOAT8
from ..schedule.steps import SPLIT_SLOTS
from ..session.bind import find_session
from ..session.session import Session
from . import c10d_fallback as c10d
from .all_to_all_args import AllToAllArgs, make_result
from .c10d_launch import start_all_gather, start_all_reduce, start_reduce_scatter
from .coalesced_args import CoalescedArgs, each_collective
from .plain_collective import launch, wait_for
from .spared_multiprocessors import multiprocessors_for, spare
from .start_args import StartArgs

SplitArgs: TypeAlias = StartArgs | AllToAllArgs | CoalescedArgs


@dataclass(frozen=True, slots=True)
class _Launched:
    """A collective of c10d. `sent` is kept because it still reads it."""

    arguments: StartArgs | AllToAllArgs
    work: Any
    """c10d's handle; None where the tensors are empty."""
    sent: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True)
class OpenCollective:
    """A collective between start and finish. `launched`: one for each tensor. `token`: weakly, its storage."""

    arguments: SplitArgs
    launched: list[_Launched]
    token: Any
    is_captured: bool
    """Its start is part of a CUDA graph."""
    use_all: Callable[[], object]
    """Lets matmuls use all multiprocessors again."""

    @property
    def is_abandoned(self) -> bool:
        """No finish can follow."""
        return bool(self.token.expired())


_open: weakref.WeakKeyDictionary[Session, dict[int, OpenCollective]] = weakref.WeakKeyDictionary()
"""By session and split slot. They end with the session, so with their process group."""


def start(a: SplitArgs) -> Tensor:
    """Launch the collective and return its token. OptionError where the slot has an open one."""
    slots = _slots(a)
    _free_slot(a, slots)
    token = make_token(a)
    each = each_collective(a) if isinstance(a, CoalescedArgs) else [a]
    launched = [_exchange(one) if isinstance(one, AllToAllArgs) else _reduce_or_gather(one) for one in each]
    is_running = any(one.work is not None for one in launched)
    use_all = spare(token, multiprocessors_for(a.group, token.device) if is_running else 0)
    slots[a.split_slot] = OpenCollective(a, launched, compat.weak_storage(token), _is_captured(a), use_all)
    return token


def make_token(a: SplitArgs) -> Tensor:
    """Return a token: it orders finish after start, and has no content."""
    return _inputs(a)[0].new_empty((1,), dtype=torch.uint8)


def _free_slot(a: SplitArgs, slots: dict[int, OpenCollective]) -> None:
    """End an abandoned collective in the slot of `a`. OptionError where one is open that can still be finished."""
    before = slots.get(a.split_slot)
    if before is None:
        return
    if not before.is_abandoned:
        gc.collect()  # a traceback may hold the token in a cycle
    if not before.is_abandoned:
        raise errors.OptionError(
            f"split slot {a.split_slot} is in use by an open collective",
            where=f"{_name(a)}, group '{a.group}'",
            got=f"{_name(before.arguments)} was started and not finished",
            expected="a finish before the next start of a slot",
            fix=f"finish it first, or use another of the {SPLIT_SLOTS} split slots. After an exception between them, drop the "
            "exception: its traceback holds the collective's tensors",
        )
    if _is_captured(a) and not before.is_captured:
        raise errors.OptionError(
            "a split slot has an abandoned collective, which cannot be finished in a CUDA graph",
            where=f"{_name(a)}, group '{a.group}'",
            got=f"{_name(before.arguments)} was started eagerly and not finished, as after an exception",
            expected="a free slot before the capture",
            fix="call the captured function once eagerly before the capture, on all ranks",
        )
    del slots[a.split_slot]
    if before.is_captured:  # nothing of it has run
        return
    _session(a).agree_on_abandoned(f"split {_kind(before.arguments)}", before.arguments.site, a.split_slot)
    for one in before.launched:
        _wait(one)


def _is_captured(a: SplitArgs) -> bool:
    return _inputs(a)[0].is_cuda and torch.cuda.is_current_stream_capturing()


def finish(a: SplitArgs) -> list[Tensor]:
    """Wait for the collective that `a` started and return its results.

    OptionError where the slot has another collective, or none. PeerTimeoutError and CollectiveError where it failed.
    """
    slots = _slots(a)
    begun = slots.get(a.split_slot)
    if begun is None or _tag(begun.arguments) != _tag(a):
        slot = f"split slot {a.split_slot}"
        raise errors.OptionError(
            f"{slot} has no open collective" if begun is None else f"{slot} holds another collective than the one to finish",
            where=f"finish at site '{a.site}', group '{a.group}'",
            got="no start since the last finish" if begun is None else _name(begun.arguments),
            expected=_name(a),
            fix="pass the arguments of the start, and finish every collective once",
        )
    del slots[a.split_slot]  # also where it fails: the error ends the collective
    begun.use_all()
    return [_wait(one) for one in begun.launched]


def _wait(launched: _Launched) -> Tensor:
    a = launched.arguments
    if launched.work is not None:
        wait_for(launched.work, a.group, a.input.device.type)
    if launched.result.is_cuda:  # finish may be on another stream than start, which has allocated them
        for tensor in (launched.sent, launched.result):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    if isinstance(a, AllToAllArgs) or a.collective == "all_gather":
        return launched.result.view(a.input.dtype)
    return c10d.divide_for_avg(launched.result, a.reduce_op, a.group).to(a.out_dtype)


def _exchange(a: AllToAllArgs) -> _Launched:
    members, result = compat.group_of(a.group), make_result(a)

    def begin() -> Any:
        into, of = _rows_of_bytes(result), _rows_of_bytes(a.input)
        return members.alltoall_base(into, of, [int(n) for n in a.output_splits], [int(n) for n in a.input_splits])

    # Without columns no rank has anything to send. A rank without rows takes part.
    work = launch(a.group, a.input.device.type, begin) if a.input.shape[1:].numel() else None
    return _Launched(a, work, a.input, result)


def _rows_of_bytes(tensor: Tensor) -> Tensor:
    """Return the contiguous [n, ..] as bytes [n, bytes of a row]."""
    rows, width = tensor.shape[0], tensor.shape[1:].numel()
    return tensor.as_strided((rows, width), (width, 1)).view(torch.uint8)  # dims of one element may have other strides


def _reduce_or_gather(a: StartArgs) -> _Launched:
    ranks = c10d.group_size(a.group)
    if a.collective == "all_gather":
        sent = a.input.view(torch.uint8) if a.input.dtype in FLOAT8 else a.input  # gloo has no such type
        result = sent.new_empty((sent.shape[0] * ranks, *sent.shape[1:]))
    else:
        sent = a.input.to(torch.promote_types(a.input.dtype, a.out_dtype))
        if a.collective == "reduce_scatter":
            result = sent.new_empty((sent.shape[0] // ranks, *sent.shape[1:]))
        else:
            result = sent.clone() if sent is a.input else sent  # c10d reduces it in place

    def begin() -> Any:
        if a.collective == "all_gather":
            return start_all_gather(result, sent, a.group)
        if a.collective == "reduce_scatter":
            return start_reduce_scatter(result, sent, a.group)
        return start_all_reduce(result, a.group)

    work = launch(a.group, a.input.device.type, begin) if result.numel() else None
    return _Launched(a, work, sent, result)


def _inputs(a: SplitArgs) -> list[Tensor]:
    return a.inputs if isinstance(a, CoalescedArgs) else [a.input]


def _session(a: SplitArgs) -> Session:
    session = find_session(a.group, _inputs(a)[0].device.type)
    assert session is not None, f"a split collective of group '{a.group}' without a session"
    return session


def _slots(a: SplitArgs) -> dict[int, OpenCollective]:
    return _open.setdefault(_session(a), {})


def _tag(a: SplitArgs) -> tuple[Any, ...]:
    return (*((tuple(x.shape), x.dtype) for x in _inputs(a)), *a[1:])


def _kind(a: SplitArgs) -> str:
    return "all_to_all" if isinstance(a, AllToAllArgs) else a.collective


def _name(a: SplitArgs) -> str:
    if isinstance(a, CoalescedArgs):
        pairs = zip(a.inputs, a.out_dtypes, strict=True)
        tensors = ", ".join(f"{x.dtype} {list(x.shape)} -> {dtype}" for x, dtype in pairs)
        return f"split {a.collective} at site '{a.site}' ({tensors})"
    if isinstance(a, AllToAllArgs):
        splits = f"input splits {list(a.input_splits)}, output splits {list(a.output_splits)}"
        return f"split all_to_all at site '{a.site}' ({a.input.dtype} {list(a.input.shape)}, {splits})"
    return f"split {a.collective} at site '{a.site}' ({a.input.dtype} {list(a.input.shape)} -> {a.out_dtype})"
