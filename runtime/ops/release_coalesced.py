"""release_coalesced: give back the landing memory that the finish of a zero-copy coalesced gather has returned.

It is release_collective for a list: `gathered` are all results of finish_coalesced, whose slot it frees.
"""

from __future__ import annotations

from .definition import OpDefinition
from .release_collective import ReleaseArgs, do_nothing

SCHEMA = "release_coalesced(Tensor(a!)[] gathered, int split_slot, str strategy, str group, str site) -> ()"

DEFINITION = OpDefinition(SCHEMA, ReleaseArgs, do_nothing)
