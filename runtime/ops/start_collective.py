"""start_collective: begin a collective, whose result finish_collective returns.

The pushes of this rank's data begin, and the op returns a token [1], uint8, without content. It orders finish after start.
The input must not be written before the finish: the pushes read it.

split_slot, 0 to 11, names the landing memory. A slot holds one open collective, so up to 12 may be open at once, with any calls
of the group between. All ranks issue starts, finishes and releases in the same order.

An exception between start and finish frees the token. Then the next start of the slot ends the collective, if all ranks have
left it so (docs/explanation/schedules.md).

zero_copy (all_gather): the result of finish is the landing memory itself, until release_collective gives it back.

Strategies are "bulk", "bulk:chunks=N" and "none". Without a transport, or with "none", c10d runs the collective concurrently.
"""

from __future__ import annotations

from torch import Tensor

from .definition import OpDefinition
from .start_args import StartArgs, make_token

SCHEMA = (
    "start_collective(Tensor input, str collective, str reduce_op, ScalarType out_dtype, int split_slot, "
    "bool zero_copy, str strategy, str group, str site) -> Tensor"
)


def fake(a: StartArgs) -> Tensor:
    """Return a token."""
    return make_token(a.input)


DEFINITION = OpDefinition(SCHEMA, StartArgs, fake)
