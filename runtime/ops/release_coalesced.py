"""release_coalesced: give back the landing memory that the finish of a zero-copy coalesced gather has returned.

It is release_collective for a list: `gathered` are all results of finish_coalesced, whose slot it frees.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .definition import OpDefinition

SCHEMA = "release_coalesced(Tensor(a!)[] gathered, int split_slot, str strategy, str group, str site) -> ()"


class ReleaseCoalescedArgs(NamedTuple):
    gathered: list[Tensor]
    split_slot: int
    strategy: str
    group: str
    site: str


def do_nothing(_a: ReleaseCoalescedArgs) -> None:
    """Return nothing: only landing memory is given back."""


DEFINITION = OpDefinition(SCHEMA, ReleaseCoalescedArgs, do_nothing, do_nothing)
