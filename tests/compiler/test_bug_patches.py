"""Workarounds for bugs of Inductor that no CPU graph meets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sympy
from torch._inductor.dependencies import MemoryDep, ReadWrites
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from ub_overlap.compiler.inductor.bug_patches import with_real_names


def test_tiles_see_reads_of_gathered_buffers() -> None:
    """A node that reads "buf3", which is "buf1" after two mutations, is analyzed as a reader of "buf1". The node stays."""
    index, size = sympy.Symbol("c0"), sympy.Integer(8)
    dependency = MemoryDep("buf3", index, (index,), (size,))
    reads = ReadWrites(OrderedSet([dependency]), OrderedSet(), OrderedSet())
    node = SimpleNamespace(read_writes=reads, group="of the node")
    graph = SimpleNamespace(scheduler=SimpleNamespace(mutation_real_name={"buf2": "buf1", "buf3": "buf1"}))

    def names(node: Any) -> tuple[str, list[str]]:
        return node.group, [dep.name for dep in node.read_writes.reads]

    with V.set_graph_handler(graph):  # type: ignore[arg-type]
        assert names(node) == ("of the node", ["buf3"])
        assert with_real_names(names)(node) == ("of the node", ["buf1"])
    assert node.read_writes is reads
