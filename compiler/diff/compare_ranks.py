"""Compare the graphs of two ranks, for the error about ranks that compiled different plans."""

from __future__ import annotations

from .edits import Diff
from .graph_store import PlanGraphs
from .snapshot import Snapshot

SHOWN = 5  # edits
MAX_BYTES = 16 << 20
"""Largest graphs of a rank, decompressed. They come from a peer: a few KiB may inflate to much more."""


def explain_difference(mine: bytes, theirs: bytes, names: tuple[str, str]) -> str:
    """Describe how the graphs before the rewrite differ: the first node with its line, and the first edits.

    ValueError if the bytes are not graphs.
    """
    own, other = (
        PlanGraphs.unpack(data, f"the graphs of {name}", MAX_BYTES) for data, name in zip((mine, theirs), names, strict=True)
    )
    diff = Diff(_labeled(own.before, names[0]), _labeled(other.before, names[1]))
    if diff.same:
        differ = "options, profile, settings or the values of dynamic sizes differ"
        return f"the {own.phase} graphs are the same ({len(own.before.nodes)} nodes): {differ}"
    lines = [f"the {own.phase} graphs differ: {diff.counts()}; the first node that differs:"]
    lines += [f"  {line}" for line in diff.first().splitlines()]
    lines += [f"  {e.title}{f' in {e.module}' if e.module else ''}" for e in diff.edits[:SHOWN]]
    if len(diff.edits) > SHOWN:
        lines.append(f"  and {len(diff.edits) - SHOWN} more")
    return "\n".join(lines)


def _labeled(s: Snapshot, rank: str) -> Snapshot:
    return Snapshot(s.nodes, s.phase, rank, "", s.torch)
