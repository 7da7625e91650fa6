"""start_coalesced: begin a collective of several tensors, whose results finish_coalesced returns.

It is start_collective for a list: one collective in one split slot, with one wait for its data. Each tensor is pushed from its
place and lands in a part of the slot of its own, so nothing is copied to join them. `out_dtypes` has one dtype for each tensor.

zero_copy (all_gather): the results of finish are landing memory, until release_coalesced gives all of it back. With a tensor
that has no elements, all results are copies.

Without a transport, or with "none", c10d runs the collectives of all tensors concurrently.
"""

from __future__ import annotations

from torch import Tensor

from .coalesced_args import CoalescedArgs
from .definition import OpDefinition
from .start_args import make_token

SCHEMA = (
    "start_coalesced(Tensor[] inputs, str collective, str reduce_op, ScalarType[] out_dtypes, int split_slot, "
    "bool zero_copy, str strategy, str group, str site) -> Tensor"
)


def fake(a: CoalescedArgs) -> Tensor:
    """Return a token."""
    return make_token(a.inputs[0])


DEFINITION = OpDefinition(SCHEMA, CoalescedArgs, fake)
