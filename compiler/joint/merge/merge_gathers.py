"""all_gather(x), all_gather(x) -> all_gather(x): linears that each gather their input share one gather.

    x -> all_gather -> wait -> ...                 x -> all_gather -> wait -> ...
    x -> all_gather -> wait -> ...     becomes                           \\ -> ...

torch's partitioner merges them too where there is a backward. Here, all passes on the joint graph see one gather with all its
readers, and graphs for inference have one gather as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from ...graph.aten import Effect, dtype_of, element_effect, shape_of
from ...graph.joint_graph import region_of
from ...match.collectives import Collective, read_again
from ..joint_decision import joint_decision, record_decision
from .limits import MergeLimits


def merge_gathers(graph: Graph, gathers: Sequence[Collective], limits: MergeLimits) -> int:
    """Merge `gathers` of equal tensors in place, as far as `limits` allow. Return how many were removed."""
    earlier: dict[tuple[object, ...], Collective] = {}
    count = 0
    for c in map(read_again, gathers):  # what was merged before may be its input
        source, key = _source(c.input), _key(c)
        kept = earlier.setdefault(key, c)
        if kept is c:
            continue
        if _is_changed_between(kept, c, source, limits) or not _hold(kept, c, limits):
            earlier[key] = c
            continue
        assert c.wait is not None and kept.wait is not None
        c.wait.replace_all_uses_with(kept.wait)
        graph.erase_node(c.wait)
        graph.erase_node(c.node)
        record_decision(kept.node, merged_count=sum(joint_decision(g.node).merged_count for g in (kept, c)))
        count += 1
    return count


def has_equal_gathers(gathers: Sequence[Collective]) -> bool:
    """Return whether two of `gathers` gather one tensor."""
    return len({_key(c) for c in gathers}) < len(gathers)


def _key(c: Collective) -> tuple[object, ...]:
    """Return what equal gathers have in common."""
    return _source(c.input), shape_of(c.input), dtype_of(c.input), c.group, c.ranks, region_of(c.node)


def _source(node: Node) -> Node:
    """Return the tensor whose elements `node` holds in the same order."""
    while (step := element_effect(node)) is not None and step.kind is Effect.SAME:
        node = step.source
    return node


def _is_changed_between(first: Collective, second: Collective, source: Node, limits: MergeLimits) -> bool:
    """Return whether the gathered tensor may change between two gathers, or their results must not share memory."""
    begin, end = limits.position[first.node], limits.position[second.node]
    if any(limits.is_written_between(n, begin, end) for n in (first.input, second.input, source)):
        return True
    return limits.is_returned(first.node) or limits.is_returned(second.node)


def _hold(first: Collective, second: Collective, limits: MergeLimits) -> bool:
    """Hold the gathered tensor of `first` for the readers of `second`'s. Return False if the memory limit is too low."""
    last_use = limits.last_use(first.node)
    if not limits.try_hold([(last_use + 1, limits.position[second.node] - 1, limits.bytes_of(first.node))]):
        return False
    limits.memory.last_use[first.node] = max(last_use, limits.last_use(second.node))
    return True
