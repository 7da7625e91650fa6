"""Two ranks' graphs compared, for the error of ranks that compiled different plans."""

from __future__ import annotations

from .edits import Diff
from .graph_store import Graphs
from .snapshot import Snapshot

SHOWN = 5  # edits


def explain(mine: bytes, theirs: bytes, names: tuple[str, str]) -> str:
    """What differs between the graphs as they came to the backend: the first node with its line, and the first edits.
    ValueError for what are no graphs."""
    here, there = Graphs.unpack(mine), Graphs.unpack(theirs)
    diff = Diff(_of(here.before, names[0]), _of(there.before, names[1]))
    if diff.same:
        return f"the {here.phase} graphs are the same ({len(here.before.nodes)} nodes): options, profile or settings differ"
    lines = [f"the {here.phase} graphs differ: {diff.counts()}; the first node that does:"]
    lines += [f"  {line}" for line in diff.first().splitlines()]
    lines += [f"  {e.title}{f' in {e.module}' if e.module else ''}" for e in diff.edits[:SHOWN]]
    if len(diff.edits) > SHOWN:
        lines.append(f"  and {len(diff.edits) - SHOWN} more")
    return "\n".join(lines)


def _of(s: Snapshot, rank: str) -> Snapshot:
    return Snapshot(s.nodes, s.phase, rank, "", s.torch)
