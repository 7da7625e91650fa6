"""Live bytes along a graph, and the bytes that a fused site adds.

A site runs where its last input is ready. Its inputs live until then; results that would have been computed later live from
then on.

Live bytes are counted as for a compiler that fuses elementwise work: a tensor that only such work reads is never written, and
such work writes its result where an operand has just died.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..cost.site_sizes import Hints
from ..graph.aten import alias_base, aten
from ..graph.sizes import about, as_sizes, evaluate_size, numel
from ..match import Bulk, Site

MORE_SHARE = 0.05
MORE_BYTES = 256 << 20
"""The graph's peak may grow by the larger of these, whatever the saving: a share of the peak, and bytes."""

HeldBytes = list[tuple[int, int, int]]
"""(first position, last position, bytes): positions of the graph between which more bytes are alive."""

_FUSED_TOO = {
    aten._to_copy.default, aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.amax.default, aten.var_mean.correction,
    aten.slice_backward.default, aten.full.default, aten.arange.default, torch.ops.prims.convert_element_type.default,
}  # fmt: skip
"""Ops that are fused like elementwise work."""


@dataclass(slots=True)
class PeakMemory:
    """Live bytes of a graph. `live`: at each position; `peak`: their maximum in the original graph; `current_peak`: with what
    sites hold; `limit`: what the peak may grow to."""

    position: dict[Node, int]
    readers: dict[Node, list[Node]]
    last_use: dict[Node, int]
    bytes: dict[Node, int]
    base: dict[Node, Node]
    live: list[int]
    peak: int
    current_peak: int
    limit: int

    @classmethod
    def of(cls, graph: Graph, hints: Hints, growth: int | None = None) -> PeakMemory:
        """Count the live bytes of `graph`. `growth`: bytes that the peak may grow by (None: the larger of the two above)."""
        position = {n: i for i, n in enumerate(graph.nodes)}
        base, readers = _find_readers(graph)
        fused = {n for n in position if is_fused(n)}
        # A tensor that only fused work reads is computed where that work runs, so its operands live until then.
        inner = {n for n in fused if base[n] is n and readers.get(n) and all(r in fused for r in readers[n])}
        last_use: dict[Node, int] = {}
        for n in reversed(position):
            if users := readers.get(n):
                last_use[n] = max(last_use[r] if r in inner else position[r] for r in users)
        size = {n: 0 if n in inner else bytes_of(n, hints) for n in position if base[n] is n}
        change = [0] * (len(position) + 1)
        nodes = list(position)
        for n, b in size.items():
            if b and _is_owned(n):
                end = last_use.get(n, position[n])
                change[position[n] if n.op != "placeholder" else 0] += b
                change[end if nodes[end] in fused and end > position[n] else end + 1] -= b
        live = list(accumulate(change[:-1]))
        peak = max(live, default=0)
        limit = peak + (max(int(MORE_SHARE * peak), MORE_BYTES) if growth is None else growth)
        return cls(position, readers, last_use, size, base, live, peak, peak, limit)

    @classmethod
    def uncounted(cls) -> PeakMemory:
        """Return a record that holds nothing, for graphs without a memory limit."""
        return cls({}, {}, {}, {}, {}, [], 0, 0, 0)

    def held_by_independent(self, site: Site) -> HeldBytes:
        """Return the bytes that a site holds because of its independent matmuls. A fall is a negative number of bytes.

        What a site with its own matmuls alone would hold is part of overlapping it, and has no price.
        """
        independent = {p.node for p in site.independent}
        if not independent:
            return []
        own = [] if isinstance(site, Bulk) else self.held_by([m for m in site.members if m not in independent])
        return self.held_by(site.members) + [(begin, end, -size) for begin, end, size in own]

    def held_by(self, members: Collection[Node]) -> HeldBytes:
        """Return the bytes that `members` as one op keep alive longer, or allocate earlier."""
        inside = set(members)
        at = self.position
        inputs = {i: None for m in members for i in m.all_input_nodes if i not in inside}
        # All members run at one time: where the last input is ready, or where the first member was.
        runs = max([at[i] + 1 for i in inputs] + [min(at[m] for m in members)])
        held = []
        for i in {self.base[i]: None for i in inputs}:
            last_use = self.last_use.get(i, at[i])
            if _is_owned(i) and last_use < runs:
                held.append((last_use + 1, runs, self.bytes[i]))
        for m in members:
            # What only the members read is never a tensor of its own.
            if at[m] > runs and self.base[m] is m and not inside.issuperset(self.readers.get(m, ())):
                held.append((runs, at[m] - 1, self.bytes[m]))  # from at[m] on it is counted already
        return held

    def growth_with(self, held: HeldBytes) -> int:
        """Return the bytes by which `held` raises the current peak."""
        ends = sorted({p for begin, end, _ in held for p in (begin, end + 1)})
        highest = self.current_peak
        for low, high in pairwise(ends):
            more = sum(size for begin, end, size in held if begin <= low <= end)
            highest = max(highest, max(self.live[low:high], default=0) + more)
        return highest - self.current_peak

    def add(self, held: HeldBytes) -> None:
        self.current_peak += self.growth_with(held)
        self._change(held, 1)

    def remove(self, held: HeldBytes, peak: int | None = None) -> None:
        """Undo `add`. `peak`: the current peak afterwards, where it is known."""
        self._change(held, -1)
        if peak is not None:
            self.current_peak = peak
            return
        # Without bytes that a site saved, the peak may be higher.
        if held and (self.current_peak > self.peak or any(size < 0 for _, _, size in held)):
            self.current_peak = max(self.peak, max(self.live))

    def _change(self, held: HeldBytes, sign: int) -> None:
        for begin, end, size in held:
            for i in range(begin, min(end + 1, len(self.live))):
                self.live[i] += sign * size


def total_bytes(held: Sequence[tuple[int, int, int]]) -> int:
    return sum(size for _, _, size in held)


def _find_readers(graph: Graph) -> tuple[dict[Node, Node], dict[Node, list[Node]]]:
    """Return the node whose memory each node uses, and the readers of each such node."""
    base: dict[Node, Node] = {}
    readers: dict[Node, list[Node]] = {}
    for n in graph.nodes:
        source = alias_base(n)
        base[n] = n if source is None else base[source]
        for i in dict.fromkeys(base[i] for i in n.all_input_nodes):
            if i is not base[n]:
                readers.setdefault(i, []).append(n)
    return base, readers


def is_fused(node: Node) -> bool:
    """Whether a compiler puts the node into one kernel with its elementwise neighbors."""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in _FUSED_TOO


def _is_owned(node: Node) -> bool:
    """Whether the graph decides how long the node's memory lives. Parameters and inputs stay allocated.

    A saved matrix that is transposed is a view of a parameter: activations are saved as they were computed.
    """
    if node.op != "placeholder":
        return node.op == "call_function"
    if node.name.startswith(("primals", "arg")):
        return False
    value = node.meta.get("val")
    return not (isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_contiguous())


def bytes_of(node: Node, hints: Hints) -> int:
    """Return about how many bytes the node's tensors take; 0 where a size has no value."""
    value = node.meta.get("val")
    size = 0
    for t in value if isinstance(value, list | tuple) else (value,):
        if isinstance(t, torch.Tensor):
            size += about(evaluate_size(numel(as_sizes(t.shape)), hints) or 0) * t.element_size()
    return size
