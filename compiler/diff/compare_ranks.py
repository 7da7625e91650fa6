"""Compare the graphs of two ranks, for the error about ranks that compiled different plans."""

from __future__ import annotations

import re

from .edits import Change, Diff
from .graph_store import PlanGraphs
from .snapshot import Snapshot

SHOWN = 5  # edits
ONE_HINT = "torch._dynamo.mark_dynamic(x, 0, hint_override=4096) for each input with that size, on all ranks"
"""What gives graphs of ranks with batches of other sizes one plan."""
MAX_BYTES = 16 << 20
"""Largest graphs of a rank, decompressed. They come from a peer: a few KiB may inflate to much more."""

_SIZES = re.compile(r"\[[-\d, ]*\]")
"""A list of integers in the text of a node's arguments."""
_SYMBOL = re.compile(r"[a-zA-Z]")


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
        same = f"the {own.phase} graphs are the same ({len(own.before.nodes)} nodes): {differ}"
        return f"{same}; plans are made for one value of a dynamic size after {ONE_HINT}" if _is_dynamic(own.before) else same
    lines = [f"the {own.phase} graphs differ: {diff.counts()}; the first node that differs:"]
    lines += [f"  {line}" for line in diff.first().splitlines()]
    lines += [f"  {e.title}{f' in {e.module}' if e.module else ''}" for e in diff.edits[:SHOWN]]
    if len(diff.edits) > SHOWN:
        lines.append(f"  and {len(diff.edits) - SHOWN} more")
    if _has_other_sizes(diff):
        lines.append(f"  only sizes differ: if they are those of the batch, mark them as dynamic with one hint: {ONE_HINT}")
    return "\n".join(lines)


def _has_other_sizes(diff: Diff) -> bool:
    """Return whether the same nodes compute tensors of other sizes, and inputs are among them."""
    changes = [c for e in diff.edits for c in e.changed]
    if any(e.removed or e.added for e in diff.edits) or not all(map(_is_of_sizes, changes)):
        return False
    return any(diff.a.nodes[c.before].op == "placeholder" and any(name == "shape" for name, *_ in c.fields) for c in changes)


def _is_of_sizes(change: Change) -> bool:
    """Return whether a node differs in sizes only: in lists of integers, where its arguments differ."""
    texts = {name: (before, after) for name, before, after in change.fields}
    own, other = (_SIZES.sub("", text) for text in texts.pop("args", ("", "")))
    return own == other and texts.keys() <= {"shape", "stride"}


def _is_dynamic(s: Snapshot) -> bool:
    return any(_SYMBOL.search(n.shape) for n in s.nodes if n.op == "placeholder")


def _labeled(s: Snapshot, rank: str) -> Snapshot:
    return Snapshot(s.nodes, s.phase, rank, "", s.torch)
