"""The texts that request a strategy: those of Strategy and DispatchTable, and some that depend on the group.

auto                          the automatic choice
chunks=4                      the automatic choice, in 4 pieces where it overlaps
pipelined:chunks=R/2          R is the number of ranks; also R and 2R, for chunks of pipelined, bulk and split, and alone
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..plan.strategy import IN_PIECES, MAX_CHUNKS, STRATEGY_FORMS, DispatchTable, Strategy, parse

AUTO = "auto"
EXPECTED = f"{AUTO}, {STRATEGY_FORMS} (of chunks also R, R/2, 2R), chunks=N alone, or a table of these"
_OF_RANKS = re.compile(rf"((?:(?:{'|'.join(mode.value for mode in IN_PIECES)}):)?chunks=)(R/2|2R|R)\Z")
_CHUNKS = re.compile(r"chunks=([1-9][0-9]?)\Z")


@dataclass(frozen=True, slots=True)
class Override:
    """A request of the user for one site. `by`: its source, e.g. "overrides[1] (module ...)" or "overrides ('backward.*')"."""

    strategy: Strategy | DispatchTable | None
    """The strategy to use; None leaves the choice automatic."""
    by: str
    chunks: int = 0
    """Pieces of an automatic choice that overlaps; 0: as many as are predicted to be best."""
    packs: tuple[int, ...] | None = None
    """The packs to use, as in `Decision`; None leaves the choice to the option `pack`."""
    independent: int = 0
    """The number of independent matmuls that a site with a given strategy takes besides its own, as in a saved plan."""
    bucket: str = ""
    """A name that the collectives of one bucket share, as in a saved plan."""


def is_requestable(text: object) -> bool:
    """Return whether `text` is one of the texts above."""
    if not isinstance(text, str):
        return False
    text = resolve_ranks(text, 2)
    return text == AUTO or _chunks_of(text) > 0 or Strategy.is_forceable(text)


def override_of(text: str, ranks: int, by: str) -> Override | None:
    """Return the request of `text` in a group of `ranks`; None for "auto"."""
    text = resolve_ranks(text, ranks)
    if text == AUTO:
        return None
    if chunks := _chunks_of(text):
        return Override(None, by, chunks)
    return Override(parse(text), by)


def resolve_ranks(text: str, ranks: int) -> str:
    """Replace R, R/2 (at least 1) and 2R by numbers."""
    match = _OF_RANKS.match(text)
    if not match:
        return text
    chunks = {"R": ranks, "R/2": max(1, ranks // 2), "2R": 2 * ranks}[match[2]]
    return f"{match[1]}{min(chunks, MAX_CHUNKS)}"


def _chunks_of(text: str) -> int:
    match = _CHUNKS.match(text)
    chunks = int(match[1]) if match else 0
    return chunks if chunks <= MAX_CHUNKS else 0
