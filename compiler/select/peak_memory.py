"""Bytes that live along a graph, and what a fused site would add: its operands wait for it, its results come with it.

A site runs where its last input is ready. What it reads lives until then, what it would have made later lives from then on.

What lives is reckoned as a compiler that fuses elementwise work makes it: what only such work reads is never written, and such
work writes its result where an operand has just died.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..cost.site_sizes import Hints
from ..cost.traffic import about
from ..graph.aten import alias_base, aten
from ..graph.sizes import as_sizes, evaluate_size, numel

MORE_SHARE = 0.05
MORE_BYTES = 256 << 20
"""The graph's peak may grow by the larger of these, whatever it is worth: a share of itself, bytes."""

Holds = list[tuple[int, int, int]]
"""(from, to, bytes): positions between which more lives."""

_ALONG = {
    aten._to_copy.default, aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.amax.default, aten.var_mean.correction,
    aten.slice_backward.default, aten.full.default, aten.arange.default, torch.ops.prims.convert_element_type.default,
}  # fmt: skip
"""What is fused as elementwise work is."""


@dataclass(slots=True)
class PeakMemory:
    """`live`: bytes alive at each position of the graph; `peak`: the most of them as the graph is, `top`: with what is held.
    `most`: what they may grow to."""

    position: dict[Node, int]
    last: dict[Node, int]
    bytes: dict[Node, int]
    base: dict[Node, Node]
    live: list[int]
    peak: int
    top: int
    most: int

    @classmethod
    def of(cls, graph: Graph, hints: Hints, more: int | None = None) -> PeakMemory:
        """`more`: bytes that the peak may grow by (None: the larger of the two above)."""
        position = {n: i for i, n in enumerate(graph.nodes)}
        base: dict[Node, Node] = {}
        read: dict[Node, list[Node]] = {}
        for n in graph.nodes:
            source = alias_base(n)
            base[n] = n if source is None else base[source]
            for i in dict.fromkeys(base[i] for i in n.all_input_nodes):
                if i is not base[n]:
                    read.setdefault(i, []).append(n)
        fused = {n for n in position if _fuses(n)}
        # What only fused work reads comes to be where that work is done, and its operands live until then.
        inner = {n for n in fused if base[n] is n and read.get(n) and all(r in fused for r in read[n])}
        last: dict[Node, int] = {}
        for n in reversed(position):
            if readers := read.get(n):
                last[n] = max(last[r] if r in inner else position[r] for r in readers)
        size = {n: 0 if n in inner else _bytes(n, hints) for n in position if base[n] is n}
        change = [0] * (len(position) + 1)
        places = list(position)
        for n, b in size.items():
            if b and _ours(n):
                end = last.get(n, position[n])
                change[position[n] if n.op != "placeholder" else 0] += b
                change[end if places[end] in fused and end > position[n] else end + 1] -= b
        live, now = [], 0
        for c in change[:-1]:
            now += c
            live.append(now)
        peak = max(live, default=0)
        most = peak + (max(int(MORE_SHARE * peak), MORE_BYTES) if more is None else more)
        return cls(position, last, size, base, live, peak, peak, most)

    @classmethod
    def uncounted(cls) -> PeakMemory:
        """Of a graph where nothing is asked of it."""
        return cls({}, {}, {}, {}, [], 0, 0, 0)

    def holds(self, members: Collection[Node]) -> Holds:
        """What `members` hold longer, and make earlier, as one op."""
        inside = set(members)
        at = self.position
        inputs = {i: None for m in members for i in m.all_input_nodes if i not in inside}
        # Beside each other in time: where the last input is ready, or where the first of them was.
        runs = max([at[i] + 1 for i in inputs] + [min(at[m] for m in members)])
        found = []
        for i in {self.base[i]: None for i in inputs}:
            last = self.last.get(i, at[i])
            if _ours(i) and last < runs:
                found.append((last + 1, runs, self.bytes[i]))
        for m in members:
            if at[m] > runs and self.base[m] is m:
                found.append((runs, at[m], self.bytes[m]))
        return found

    def lift(self, holds: Holds) -> int:
        """Bytes by which the peak, as it is now, grows with `holds`."""
        ends = sorted({p for begin, end, _ in holds for p in (begin, end + 1)})
        most = self.top
        for low, high in pairwise(ends):
            held = sum(more for begin, end, more in holds if begin <= low <= end)
            most = max(most, max(self.live[low:high], default=0) + held)
        return most - self.top

    def add(self, holds: Holds) -> None:
        """What is held from now on."""
        self.top += self.lift(holds)
        self._change(holds, 1)

    def remove(self, holds: Holds) -> None:
        """What is held no longer."""
        self._change(holds, -1)
        if holds and self.top > self.peak:
            self.top = max(self.live)

    def _change(self, holds: Holds, sign: int) -> None:
        for begin, end, more in holds:
            for i in range(begin, min(end + 1, len(self.live))):
                self.live[i] += sign * more


def total(holds: Sequence[tuple[int, int, int]]) -> int:
    return sum(more for _, _, more in holds)


def _fuses(node: Node) -> bool:
    """Is it elementwise work, which a compiler puts into one kernel with its like?"""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in _ALONG


def _ours(node: Node) -> bool:
    """Does the graph decide how long its memory lives? Parameters and inputs stay where they are; a matrix that was saved
    transposed is a view of a parameter: activations are saved as they were made."""
    if node.op != "placeholder":
        return node.op == "call_function"
    if node.name.startswith(("primals", "arg")):
        return False
    value = node.meta.get("val")
    return not (isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_contiguous())


def _bytes(node: Node, hints: Hints) -> int:
    """Of all tensors that a node makes, about; 0 where a size has no value."""
    value = node.meta.get("val")
    size = 0
    for t in value if isinstance(value, list | tuple) else (value,):
        if isinstance(t, torch.Tensor):
            size += about(evaluate_size(numel(as_sizes(t.shape)), hints) or 0) * t.element_size()
    return size
