"""start_all_to_all: begin to send each rank its rows of `input`. finish_all_to_all returns the rows that this rank receives.

Legend: R ranks of the group. The splits are rows of dim 0, R of each, 0 or more.

    input_splits[d]     rows that this rank sends to rank d; they lie in rank order in the input, and sum up to its rows
    output_splits[s]    rows that rank s sends to this rank: its input_splits at this rank

A rank knows the splits of its own pieces only. They may be unbacked sizes of a graph, and differ between ranks and calls.
Where those of two ranks disagree, ShapeMismatchError names both.

The op returns a token [1], uint8, without content, as start_collective does. split_slot, the order on all ranks, and the
input, which must not be written before the finish, are also as there. All dtypes are moved as bytes.

one_area: every rank receives rows from one peer at most, as in a step of a ring. Its landing memory is then one area, not one
for each peer. The same on all ranks.

A piece that is larger than its landing memory travels in rounds, of which the first begins now
(docs/explanation/all_to_all.md).

Strategies are "bulk" and "none". Without a transport, or with "none", c10d runs the exchange concurrently.
"""

from __future__ import annotations

from torch import Tensor

from .all_to_all_args import AllToAllArgs
from .definition import OpDefinition
from .start_args import make_token

SCHEMA = (
    "start_all_to_all(Tensor input, SymInt[] output_splits, SymInt[] input_splits, int split_slot, bool one_area, "
    "str strategy, str group, str site) -> Tensor"
)


def fake(a: AllToAllArgs) -> Tensor:
    """Return a token."""
    return make_token(a.input)


DEFINITION = OpDefinition(SCHEMA, AllToAllArgs, fake)
