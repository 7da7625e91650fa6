"""Limits on merging: what is written in between, and how much memory may be held."""

from __future__ import annotations

from torch.fx import Graph, Node

from ...cost.site_sizes import hints_of
from ...cost.traffic import about
from ...graph.aten import dtype_of, is_mutable, shape_of, storage_node
from ...graph.sizes import evaluate_size, numel
from ...select.peak_memory import HeldBytes, PeakMemory


class MergeLimits:
    """Writes and live bytes of a graph, by the positions of its nodes before anything was merged."""

    def __init__(self, graph: Graph, growth: int | None = None) -> None:
        """`growth`: bytes by which merging may raise the memory peak; None for the limit of bulk sites."""
        self._hints = hints_of(graph)
        self.memory = PeakMemory.of(graph, self._hints, growth)
        self.position = self.memory.position
        self._writes = [
            (at, {storage_node(i) for i in node.all_input_nodes}) for node, at in self.position.items() if is_mutable(node)
        ]
        self._returned = {storage_node(i) for out in graph.find_nodes(op="output") for i in out.all_input_nodes}

    def is_written_between(self, tensor: Node, begin: int, end: int) -> bool:
        """Return whether a node between two positions writes to the memory of `tensor`."""
        memory = storage_node(tensor)
        return any(begin < at < end and memory in tensors for at, tensors in self._writes)

    def is_returned(self, tensor: Node) -> bool:
        """Return whether the graph returns `tensor` or a view of it: no other output may use its memory."""
        return storage_node(tensor) in self._returned

    def last_use(self, tensor: Node) -> int:
        """Return the position of the last node that needs the memory of `tensor`."""
        memory = storage_node(tensor)
        return self.memory.last_use.get(memory, self.position[memory])

    def bytes_of(self, tensor: Node) -> int:
        """Return about how many bytes `tensor` takes."""
        return about(evaluate_size(numel(shape_of(tensor)), self._hints) or 0) * dtype_of(tensor).itemsize

    def try_hold(self, held: HeldBytes) -> bool:
        """Count `held` as alive. Return False, and count nothing, if the peak would exceed the limit."""
        held = [(begin, end, size) for begin, end, size in held if begin <= end and size > 0]
        if self.memory.current_peak + self.memory.growth_with(held) > self.memory.limit:
            return False
        self.memory.add(held)
        return True
