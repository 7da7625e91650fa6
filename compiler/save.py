"""What backward keeps of a gathered tensor: decided on the joint graph, before the partitioner, from the same site finder.

torch saves the gathered tensor by default (R times the shard). With save="shard" every node that carries gathered elements is
marked for recomputation, so the partitioner saves the shard and backward gathers again: a gather that meets the
weight-gradient matmuls and is overlapped with them like any other site.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from .sites import Gather, find


def keep_shards(graph: Graph) -> int:
    """Marks the gathers of the forward half of a joint graph for recomputation in backward; returns how many."""
    backward = _needs_tangents(graph)
    marked = 0
    for candidate in find(graph):
        match = candidate.match
        if not isinstance(match, Gather) or match.collective.node in backward:
            continue
        for node in (match.collective.node, *match.holders, *match.cuts):
            if node not in backward:
                node.meta["recompute"] = compat.must_recompute()
                node.meta.setdefault("ac_graph_id", 0)
        marked += 1
    return marked


def _needs_tangents(graph: Graph) -> set[Node]:
    out: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "tangents" in node.name:
                out.add(node)
        elif any(i in out for i in node.all_input_nodes):
            out.add(node)
    return out
