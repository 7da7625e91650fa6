"""finish_all_to_all: return the rows that all ranks have sent to this one: [sum(output_splits), *input.shape[1:]].

They lie in the order of their source ranks. The op takes the token and the arguments of start_all_to_all, with the same input.
With `order` [n] it returns rows[order], [n, *input.shape[1:]], which are copied once, from where they have landed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .all_to_all_args import AllToAllArgs, make_result
from .definition import OpDefinition

SCHEMA = (
    "finish_all_to_all(Tensor token, Tensor input, SymInt[] output_splits, SymInt[] input_splits, int split_slot, "
    "bool one_area, str strategy, str group, str site, Tensor? order=None) -> Tensor"
)


class FinishAllToAllArgs(NamedTuple):
    token: Tensor
    input: Tensor
    output_splits: Sequence[Any]
    input_splits: Sequence[Any]
    split_slot: int
    one_area: bool
    strategy: str
    group: str
    site: str
    order: Tensor | None = None
    """Numbers of received rows, int64; those below zero count from the end."""


def fake(a: FinishAllToAllArgs) -> Tensor:
    """Return an empty tensor of the result's sizes."""
    result = make_result(AllToAllArgs(*a[1:-1]))
    return result if a.order is None else result.new_empty((a.order.shape[0], *result.shape[1:]))


DEFINITION = OpDefinition(SCHEMA, FinishAllToAllArgs, fake)
