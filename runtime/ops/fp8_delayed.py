"""The ops of delayed scaling, as graphs call them (docs/ops.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from ..fp8.amax_history.delayed_cast import cast
from ..fp8.amax_history.first_call import known
from ..fp8.amax_history.history import SEPARATOR, state_of

_LIBRARY = torch.library.Library("ub_overlap", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def fp8_history(weight: Tensor, keys: str, step: bool) -> tuple[Tensor, Tensor]:
    """(float32 [N], the largest of each history, 0 for an empty one; int64 [N], their columns), of the module of `weight`.

    `step`: what was seen since the last step is pushed before, unless this is a forward that a checkpoint runs again."""
    state, names = state_of(keys)
    bank, number = state.graph(names, weight)
    columns = bank.columns[names, number].clone()
    backward, module = compat.in_backward(), (names.partition(SEPARATOR)[0], number)
    if not step and not backward:  # a reentrant checkpoint's: the forward in backward will be the step
        bank.begun.discard(module)
    if step:
        again = backward and module in bank.begun
        if again:
            bank.repeating.update(names.split(SEPARATOR))
        else:
            if not backward:
                bank.begun.add(module)
            if bank.repeating:
                bank.repeating.difference_update(names.split(SEPARATOR))
        step = not again
    past = bank.past.index_select(1, columns)
    if step:
        seen = bank.seen.index_select(0, columns)
        bank.seen.index_fill_(0, columns, 0.0)
        past = torch.where(seen > 0, torch.cat([seen[None], past[:-1]]), past)
        bank.past.index_copy_(1, columns, past)
    return past.amax(0), columns


def fp8_quantise(
    x: Tensor, most: Tensor, columns: Tensor, at: int, key: str, format: torch.dtype, notes: str, groups: str
) -> tuple[Tensor, Tensor]:
    """x any shape, in 16 bits; most, columns [N] -> (float8 of x's shape, contiguous; its scale []).

    `notes`: "forward" or "backward", where it is a cast of a step, else "never". `groups`: joined by ";", whose ranks need one
    scale; `most` is the same on them."""
    state, name = state_of(key)
    bank = state.bank(name, x.device)
    # Of one module the host knows the column; of several it is told by `columns`, without waiting for them.
    alone = slice(bank.slots[name], bank.slots[name] + 1) if bank.modules[name] == 1 else None
    column = columns[at : at + 1]
    if groups:
        most, at = known(bank, x, most[at : at + 1], column, alone, name, notes, groups), 0
    noting = notes == "backward" or (notes == "forward" and name not in bank.repeating)
    noted = bank.seen[alone] if noting and alone is not None else bank.seen.new_zeros(1)
    found = cast(x, most, at, noted, format)
    if noting and alone is None:
        bank.seen.scatter_reduce_(0, column, noted, "amax")
    return found


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ub_overlap::{name}", fake, lib=_LIBRARY)


def _fake_history(weight: Tensor, keys: str, step: bool) -> tuple[Tensor, Tensor]:
    n = keys.count(SEPARATOR)
    return weight.new_empty((n,), dtype=torch.float32), weight.new_empty((n,), dtype=torch.int64)


def _fake_quantise(
    x: Tensor, most: Tensor, columns: Tensor, at: int, key: str, format: torch.dtype, notes: str, groups: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=format), x.new_empty((), dtype=torch.float32)


_define("fp8_history(Tensor weight, str keys, bool step) -> (Tensor most, Tensor columns)", fp8_history, _fake_history)
_define(
    "fp8_quantise(Tensor x, Tensor most, Tensor columns, int at, str key, ScalarType format, str notes, str groups)"
    " -> (Tensor q, Tensor scale)",
    fp8_quantise,
    _fake_quantise,
)
