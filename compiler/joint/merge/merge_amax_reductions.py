"""all_reduces of the amax of weights -> one all_reduce, for float8 weights that a graph gathers (ZeRO-3).

    w1 -> amax -> all_reduce(max) -> wait -> scale 1    becomes    cat(amaxes) -> all_reduce(max) -> wait -> select -> scale i
    w2 -> amax -> all_reduce(max) -> wait -> scale 2

It holds for every amax that graph inputs alone determine, so that it can be computed when the graph begins. An amax behind a
matmul or another collective would delay the first one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ...graph.aten import aten, c10d, dtype_of, is_random, shape_of, storage_node, written_memory
from ...graph.emitter import Emitter
from ...graph.joint_graph import needs_tangents
from ...graph.matmul import is_matmul
from ...graph.sizes import is_same, numel
from ...match.amax_reductions import is_amax_reduction
from ...match.collectives import Collective, find_collectives, is_collective
from ..joint_decision import record_decision


def merge_amax_reductions(graph: Graph) -> int:
    """Merge in place. Return the number of removed all_reduces."""
    amaxes = [c for c in find_collectives(graph) if _is_number(c) and is_amax_reduction(c)]
    if len(amaxes) < 2:
        return 0
    ready = _computed_from_inputs(graph)
    alike: dict[tuple[Any, ...], list[Collective]] = defaultdict(list)
    for c in amaxes:
        if c.input in ready:
            alike[c.group, dtype_of(c.input), c.input.meta["val"].device].append(c)
    merged = [group for group in alike.values() if len(group) > 1]
    for group in merged:
        _merge(graph, group)
    if merged:
        compat.stable_topological_sort(graph)
    return sum(len(group) - 1 for group in merged)


def _is_number(c: Collective) -> bool:
    return c.wait is not None and c.group is not None and c.reduce_op == "max" and is_same(numel(shape_of(c.input)), 1)


def _computed_from_inputs(graph: Graph) -> set[Node]:
    """Return the values that the inputs of a joint graph's forward determine, by kernels that wait for no matmul or
    collective."""
    tangents = needs_tangents(graph)
    written = written_memory(graph)
    found: set[Node] = set()
    for n in graph.nodes:
        waits = is_matmul(n) or is_collective(n) or n.target is c10d.wait_tensor.default
        if not (waits or is_random(n) or n in tangents or storage_node(n) in written) and found.issuperset(n.all_input_nodes):
            found.add(n)
    return found


def _merge(graph: Graph, amaxes: list[Collective]) -> None:
    first = amaxes[0]
    assert first.wait is not None
    with graph.inserting_before(first.node):
        e = Emitter(graph, first.node, {})
        numbers = e.call(aten.cat.default, [e.reshape(c.input, (1,)) for c in amaxes])
        reduced = e.call(c10d.all_reduce.default, numbers, "max", first.group)
        wait = e.call(c10d.wait_tensor.default, reduced)
        record_decision(reduced, carries_scales=True)
        wait.meta.pop("ac_graph_id", None)
        wait.meta["recompute"] = compat.CheckpointPolicy.MUST_SAVE  # computed again, backward would wait for all weights again
        for i, c in enumerate(amaxes):
            assert c.wait is not None
            c.wait.replace_all_uses_with(e.reshape(e.call(aten.select.int, wait, 0, i), shape_of(c.input)))
    for c in amaxes:
        assert c.wait is not None
        graph.erase_node(c.wait)
        graph.erase_node(c.node)
