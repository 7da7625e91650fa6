"""Decide on the joint graph whether backward keeps a gathered tensor or its shard. Runs before the partitioner, on the matches.

torch saves the gathered tensor by default (R times the shard). A gather whose nodes are marked for recomputation is saved as
its shard instead, and backward gathers again. That gather feeds the weight-gradient matmuls and is overlapped like any other.

    memory_budget=None   gathered tensors
    memory_budget=0      shards
    memory_budget=B      gathered where it saves the most time per byte, until B is spent; shards otherwise
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..cost.policy import Policy
from ..cost.regather import regather_us
from ..cost.site_sizes import Hints, hints_of
from ..graph.aten import dtype_of, shape_of, storage_node
from ..graph.joint_graph import FIRST_REGION, LAST_REGION, RECOMPUTED, mark_recomputed, needs_tangents
from ..graph.matmul import Matmul, as_matmul, is_matmul
from ..graph.sizes import evaluate_size, numel
from ..match import Candidate, Gather, find_candidates
from ..options import Options
from ..plan.decision import SavedActivation
from .joint_decision import record_decision


@dataclass(frozen=True, slots=True)
class _Weighed:
    match: Gather
    nodes: tuple[Node, ...]
    """Nodes to mark for recomputation: those of the forward that carry gathered elements."""
    kept: SavedActivation


def apply_save_policy(graph: Graph, options: Options, policy: Policy) -> int:
    """Mark gathers in the forward half of a joint graph for recomputation. Return how many."""
    if options.memory_budget is None:
        return 0
    backward = needs_tangents(graph)
    if not backward:
        return 0
    hints = hints_of(graph)
    candidates = find_candidates(graph)
    input_gradients = _InputGradients(graph, backward)
    weighed = [w for c in candidates if (w := _weigh(c, backward, input_gradients, options, policy, hints)) is not None]
    if options.memory_budget == 0:
        whole: set[int] = set()
    else:
        # A region that the user checkpoints is not kept, so it does not count.
        weighed = [
            w for w in weighed if not any("recompute" in n.meta and n.meta.get(RECOMPUTED) != FIRST_REGION for n in w.nodes)
        ]
        whole = _within([w.kept for w in weighed], options.memory_budget)
    for i, w in enumerate(weighed):
        kept = w.kept if i in whole else replace(w.kept, keeps="shard")
        record_decision(w.match.collective.node, saved_activation=kept)
        if i not in whole:
            mark_recomputed(w.nodes, LAST_REGION)
    return len(weighed) - len(whole)


def _within(kept: list[SavedActivation], budget: float) -> set[int]:
    """Return the indices of those to keep gathered: the most microseconds per byte first, while they fit.

    `budget`: up to 1 a share of all bytes, above that bytes.
    """
    left = budget * sum(k.gathered_bytes for k in kept) if budget <= 1 else budget
    whole = set()
    for i in sorted(range(len(kept)), key=lambda i: (-kept[i].again_us / max(1, kept[i].gathered_bytes), i)):
        if kept[i].gathered_bytes <= left:
            left -= kept[i].gathered_bytes
            whole.add(i)
    return whole


def _weigh(
    candidate: Candidate, backward: set[Node], input_gradients: _InputGradients, options: Options, policy: Policy, hints: Hints
) -> _Weighed | None:
    """Return the cost of gathering again; None unless it is a gather of the forward that backward reads."""
    match = candidate.match
    if not isinstance(match, Gather) or match.collective.node in backward:
        return None
    nodes = tuple(n for n in (match.collective.node, *match.aliases, *match.cuts) if n not in backward)
    if not any(u in backward for n in nodes for u in n.users):
        return None
    c = match.collective
    consumers = tuple(k for k in match.consumers if k.compute.node in backward)
    taken = {k.compute.node for k in consumers} | set(match.aliases) | set(match.cuts)
    kept_aliases = tuple(h for h in match.aliases if any(u in backward and u not in taken for u in h.users))
    again = replace(match, consumers=consumers, kept_aliases=kept_aliases) if consumers else None
    forward = [k.operand.node for k in match.consumers if k.compute.node not in backward]
    profile = policy.profile(c.ranks, c.node.meta["val"].device.type)
    independent = () if policy.independent_matmuls == "off" else input_gradients.of(forward)
    us = regather_us(c, again, independent, profile, hints, options.overlap != "off")
    gathered = _bytes(c.node, hints)
    return _Weighed(match, nodes, SavedActivation("gathered", gathered, _bytes(c.input, hints), round(us, 2)))


class _InputGradients:
    """Matmuls of the backward half by the tensors that they read.

    Those that read a layer's weight compute its input's gradient. They do not need the layer's input.
    """

    def __init__(self, graph: Graph, backward: set[Node]) -> None:
        self._by: dict[Node, list[Matmul]] = {}
        for n in graph.nodes:
            if n in backward and is_matmul(n) and (p := as_matmul(n)) is not None:
                for operand in (p.lhs, p.rhs):
                    self._by.setdefault(storage_node(operand.node), []).append(p)

    def of(self, weights: list[Node]) -> tuple[Matmul, ...]:
        found = {p.node: p for w in weights for p in self._by.get(storage_node(w), ())}
        return tuple(found.values())


def _bytes(node: Node, hints: Hints) -> int:
    return (evaluate_size(numel(shape_of(node)), hints) or 0) * dtype_of(node).itemsize
