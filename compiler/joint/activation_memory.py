"""Decide on the joint graph whether backward keeps a gathered tensor or its shard. Runs before the partitioner, on the matches.

torch saves the gathered tensor by default (R times the shard). A gather whose nodes are marked for recomputation is saved as
its shard instead, and backward gathers again. That gather feeds the weight-gradient matmuls and is overlapped like any other.

    memory_budget=None   gathered tensors
    memory_budget=0      shards
    memory_budget=B      gathered where it saves the most time per byte, until B is spent; shards otherwise

What a float8 matmul reads of a gathered tensor counts too, also where the gather has no match: weights are its right operand.
Backward gathers again and computes the casts again that follow the gather.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..cost.policy import Policy
from ..cost.regather import regather_us
from ..cost.site_sizes import Hints, hints_of
from ..graph.aten import dtype_of, is_mutable, is_random, shape_of, storage_node, tensor_of
from ..graph.joint_graph import FIRST_REGION, LAST_REGION, RECOMPUTED, mark_recomputed, needs_tangents
from ..graph.matmul import Matmul, as_matmul, is_matmul
from ..graph.sizes import evaluate_size, numel
from ..match import Candidate, Gather, find_candidates
from ..match.collectives import Collective, Op, is_collective
from ..options import Options
from ..plan.decision import SavedActivation
from .joint_decision import record_decision


@dataclass(frozen=True, slots=True)
class _Weighed:
    collective: Collective
    nodes: tuple[Node, ...]
    """Nodes to mark for recomputation: those of the forward that carry gathered elements, or are computed from them alone."""
    is_checkpointed: bool
    """Whether the user's program says if backward gathers again."""
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
        weighed = [w for w in weighed if not w.is_checkpointed]
        whole = _within([w.kept for w in weighed], options.memory_budget)
    for i, w in enumerate(weighed):
        kept = w.kept if i in whole else replace(w.kept, keeps="shard")
        record_decision(w.collective.node, saved_activation=kept)
        if i not in whole:
            mark_recomputed(w.nodes, LAST_REGION)
    return len(weighed) - len(whole)


def _is_checkpointed(node: Node) -> bool:
    """Return whether the user's program says if backward computes `node` again."""
    return "recompute" in node.meta and node.meta.get(RECOMPUTED) != FIRST_REGION


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
    c, match = candidate.collective, candidate.match
    if c.op is not Op.ALL_GATHER or c.node in backward:
        return None
    if not isinstance(match, Gather):
        return _weigh_float8(c, backward, options, policy, hints)
    nodes = tuple(n for n in (c.node, *match.aliases, *match.cuts) if n not in backward)
    if not any(u in backward for n in nodes for u in n.users):
        return None
    again = _consumed_in_backward(match, backward)
    forward = [k.operand.node for k in match.consumers if k.compute.node not in backward]
    profile = policy.profile(c.ranks, c.node.meta["val"].device.type)
    independent = () if policy.independent_matmuls == "off" else input_gradients.of(forward)
    us = regather_us(c, again, independent, profile, hints, options.overlap != "off")
    kept = SavedActivation("gathered", _bytes(c.node, hints), _bytes(c.input, hints), round(us, 2))
    return _Weighed(c, nodes, any(map(_is_checkpointed, nodes)), kept)


def _weigh_float8(c: Collective, backward: set[Node], options: Options, policy: Policy, hints: Hints) -> _Weighed | None:
    """Return the same for a gather whose elements, or their casts, a float8 matmul of backward reads."""
    nodes = _computed_from(c, backward)
    saved = {storage_node(n) for n in nodes if any(u in backward for u in n.users)}
    matmuls = [as_matmul(u) for n in nodes for u in n.users if is_matmul(u)]
    if not saved or not any(p is not None and p.scales is not None for p in matmuls):
        return None
    profile = policy.profile(c.ranks, c.node.meta["val"].device.type)
    us = regather_us(c, None, (), profile, hints, options.overlap != "off")
    kept = SavedActivation("gathered", sum(_bytes(n, hints) for n in saved), _bytes(c.input, hints), round(us, 2))
    return _Weighed(c, nodes, _is_checkpointed(c.node), kept)


def _computed_from(c: Collective, backward: set[Node]) -> tuple[Node, ...]:
    """Return the gather and the nodes of forward that are computed from it alone, up to matmuls and other collectives."""
    found = [c.node]
    for node in found:
        found += [u for u in node.users if u not in found and u not in backward and _follows(u, found)]
    return tuple(found)


def _follows(node: Node, found: list[Node]) -> bool:
    """Return whether `node` is a tensor that backward can compute again from `found` alone. Sizes are not computed again."""
    stops = is_matmul(node) or is_mutable(node) or is_random(node) or is_collective(node)
    return tensor_of(node) is not None and not stops and all(i in found for i in node.all_input_nodes)


def _consumed_in_backward(match: Gather, backward: set[Node]) -> Gather | None:
    """Return the site of the second gather: `match` with the consumers of backward. None if no matmul of backward reads it."""
    consumers = tuple(k for k in match.consumers if k.compute.node in backward)
    taken = {k.compute.node for k in consumers} | set(match.aliases) | set(match.cuts)
    kept_aliases = tuple(h for h in match.aliases if any(u in backward and u not in taken for u in h.users))
    return replace(match, consumers=consumers, kept_aliases=kept_aliases) if consumers else None


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
