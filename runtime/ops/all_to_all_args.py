"""The arguments of start_all_to_all, which finish_all_to_all takes again, and the fakes of both ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ub_overlap import _torch_compat as compat


class AllToAllArgs(NamedTuple):
    input: Tensor
    output_splits: Sequence[Any]
    """Rows that this rank receives from each rank; symbolic in a graph."""
    input_splits: Sequence[Any]
    """Rows that this rank sends to each rank."""
    split_slot: int
    one_area: bool
    """Every rank receives rows from one peer at most."""
    strategy: str
    group: str
    site: str


def make_result(a: AllToAllArgs) -> Tensor:
    """Return an empty tensor of the result's sizes. The splits may be unbacked."""
    rows: Any = 0
    for split in a.output_splits:
        compat.check(split >= 0, lambda: "the output splits of an all_to_all are 0 or more")
        rows = rows + split
    return a.input.new_empty((rows, *a.input.shape[1:]))
