"""Sizes of all_to_alls in checkpointed regions: backward keeps the numbers of forward, and exchanges nothing to learn them.

    counts -> all_to_all -> wait -> .tolist()            a checkpointed region repeats it, and the host waits again
    sym_size(all_to_all(rows, received, sent), 0)        the shape of a gradient: repeats an exchange, and what computes `rows`

So the counts that were received and the numbers that the host reads are saved, a few integers for each rank and expert. The
rows of a result are the sum of its output splits. Ranks have equal numbers in backward as in the first run, since a
checkpointed region computes the same values again.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..cost.site_sizes import Hints, hints_of
from ..graph.aten import aten, c10d, dtype_of, shape_of
from ..graph.sizes import evaluate_size, numel
from ..match.all_to_all import host_reads, split_args
from ..match.collectives import Collective, Op, find_collectives

MAX_KEPT_BYTES = 64 << 10
"""Bytes of received counts that are saved at most, of exchanges in equal parts."""


def may_keep_sizes(graph: Graph) -> bool:
    """Return whether a joint graph has all_to_alls in a checkpointed region."""
    exchanges = graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
    return any("recompute" in node.meta for node in exchanges)


def keep_exchange_sizes(graph: Graph) -> int:
    """Change a joint graph in place. Return how many numbers are saved, or computed from others."""
    exchanges = [c for c in find_collectives(graph) if c.op is Op.ALL_TO_ALL and c.wait is not None]
    hints = hints_of(graph)
    kept = dict.fromkeys(read for c in exchanges for read in host_reads(c))
    kept |= dict.fromkeys(c.wait for c in exchanges if c.wait and _is_recomputed(c.node) and _are_counts(c, hints))
    saved = [node for node in kept if _is_recomputed(node)]
    for node in saved:
        node.meta["recompute"] = compat.CheckpointPolicy.MUST_SAVE
    return len(saved) + sum(_sum_splits(graph, c) for c in exchanges)


def _is_recomputed(node: Node) -> bool:
    """Return whether a checkpointed region computes `node` again, for want of another policy."""
    return bool(node.meta.get("recompute") == compat.CheckpointPolicy.PREFER_RECOMPUTE)


def _are_counts(c: Collective, hints: Hints) -> bool:
    """Return whether an all_to_all exchanges a few integers, as many on all ranks: they must all save them, or none."""
    dtype, splits = dtype_of(c.node), split_args(c)
    are_equal = len({*splits[0], *splits[1]}) == 1 and all(isinstance(split, int) for split in splits[0])
    is_integer = not (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1  # bytes may be float8 rows
    size = evaluate_size(numel(shape_of(c.node)), hints) if are_equal and is_integer else None
    return size is not None and size * dtype.itemsize <= MAX_KEPT_BYTES


def _sum_splits(graph: Graph, c: Collective) -> int:
    """Replace the nodes that ask for the rows of an all_to_all's result by the sum of its output splits. Return how many."""
    splits = split_args(c)[0]
    results = [node for node in (c.node, c.wait) if node is not None]
    asked = [u for node in results for u in node.users if u.target is aten.sym_size.int and u.args[1] == 0]
    for user in asked:
        with graph.inserting_before(user):
            total = graph.call_function(torch.sym_sum, (tuple(splits),))
        total.meta.update(user.meta)
        user.replace_all_uses_with(total)
        graph.erase_node(user)
    return len(asked)
