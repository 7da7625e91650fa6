"""finish_all_to_all: return the rows that all ranks have sent to this one: [sum(output_splits), *input.shape[1:]].

They lie in the order of their source ranks. The op takes the token and the arguments of start_all_to_all, with the same input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import c10d_split
from .all_to_all_args import AllToAllArgs, make_result
from .definition import OpDefinition

SCHEMA = (
    "finish_all_to_all(Tensor token, Tensor input, SymInt[] output_splits, SymInt[] input_splits, int split_slot, "
    "bool one_area, str strategy, str group, str site) -> Tensor"
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


def fake(a: FinishAllToAllArgs) -> Tensor:
    """Return an empty tensor of the result's sizes."""
    return make_result(AllToAllArgs(*a[1:]))


def fallback(a: FinishAllToAllArgs) -> Tensor:
    """Wait for the exchange that c10d runs."""
    return c10d_split.finish(AllToAllArgs(*a[1:]))[0]


DEFINITION = OpDefinition(SCHEMA, FinishAllToAllArgs, fake, fallback)
