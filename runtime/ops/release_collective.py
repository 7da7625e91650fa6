"""release_collective: give back the landing memory that the finish of a zero-copy gather has returned.

It frees the split slot: peers may write there from now on. `gathered` is the result of finish_collective, and no node may read
it, or a view of it, behind the release. The schema says that the op writes `gathered`, so compilers keep readers in front.

Every rank releases each zero-copy gather once, in the order of its other starts and finishes. Where c10d runs the collective,
the result is a tensor of its own, and the op does nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .definition import OpDefinition

SCHEMA = "release_collective(Tensor(a!) gathered, int split_slot, str strategy, str group, str site) -> ()"


class ReleaseArgs(NamedTuple):
    gathered: Tensor | list[Tensor]
    """A list: of release_coalesced."""
    split_slot: int
    strategy: str
    group: str
    site: str


def do_nothing(_a: ReleaseArgs) -> None:
    """Return nothing: only landing memory is given back."""


DEFINITION = OpDefinition(SCHEMA, ReleaseArgs, do_nothing)
