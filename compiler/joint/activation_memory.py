"""Decide on the joint graph whether backward keeps a gathered tensor or its shard. Runs before the partitioner, on the matches.

torch saves the gathered tensor by default (R times the shard). A gather whose nodes are marked for recomputation is saved as
its shard instead, and backward gathers again. That gather feeds the weight-gradient matmuls and is overlapped like any other.

    memory_budget=None   gathered tensors
    memory_budget=0      shards
    memory_budget=B      gathered where it saves the most time per byte, until B is spent; shards otherwise

Weights that are gathered in float8 have no match: a scaled matmul reads them as its right operand. They count all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..cost.policy import Policy
from ..cost.regather import regather_us
from ..cost.site_sizes import Hints, hints_of
from ..graph.aten import dtype_of, element_effect, shape_of, storage_node
from ..graph.joint_graph import FIRST_REGION, LAST_REGION, RECOMPUTED, mark_recomputed, needs_tangents
from ..graph.matmul import Matmul, as_matmul, is_matmul
from ..graph.sizes import evaluate_size, numel
from ..match import Candidate, Gather, find_candidates
from ..match.collectives import Collective, Op
from ..options import Options
from ..plan.decision import SavedActivation
from ..plan.reasons import Reason
from .joint_decision import record_decision

_LAYOUT_COPY = "ub_overlap.fp8_layout_copy.default"


@dataclass(frozen=True, slots=True)
class _Weighed:
    collective: Collective
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
        weighed = [w for w in weighed if not any(map(_is_checkpointed, w.nodes))]
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
    if c.node in backward:
        return None
    if isinstance(match, Gather):
        holders = [c.node, *match.aliases, *match.cuts]
    elif _is_float8_weight(candidate):
        holders = _holders(c)
    else:
        return None
    nodes = tuple(n for n in holders if n not in backward)
    if not any(u in backward for n in nodes for u in n.users):
        return None
    profile = policy.profile(c.ranks, c.node.meta["val"].device.type)
    again, independent = None, tuple[Matmul, ...]()
    if isinstance(match, Gather):
        again = _consumed_in_backward(match, backward)
        forward = [k.operand.node for k in match.consumers if k.compute.node not in backward]
        independent = () if policy.independent_matmuls == "off" else input_gradients.of(forward)
    us = regather_us(c, again, independent, profile, hints, options.overlap != "off")
    return _Weighed(c, nodes, SavedActivation("gathered", _bytes(c.node, hints), _bytes(c.input, hints), round(us, 2)))


def _consumed_in_backward(match: Gather, backward: set[Node]) -> Gather | None:
    """Return the site of the second gather: `match` with the consumers of backward. None if no matmul of backward reads it."""
    consumers = tuple(k for k in match.consumers if k.compute.node in backward)
    taken = {k.compute.node for k in consumers} | set(match.aliases) | set(match.cuts)
    kept_aliases = tuple(h for h in match.aliases if any(u in backward and u not in taken for u in h.users))
    return replace(match, consumers=consumers, kept_aliases=kept_aliases) if consumers else None


def _is_float8_weight(candidate: Candidate) -> bool:
    """Return whether scaled matmuls read what is gathered, in a form that has no site."""
    miss = candidate.miss
    return candidate.collective.op is Op.ALL_GATHER and miss is not None and miss.reason is Reason.SCALED_FORM


def _holders(c: Collective) -> list[Node]:
    """Return the gather and all nodes that hold its elements, also in another layout."""
    found = [c.node]
    for node in found:
        passes_on = [u for u in node.users if u is c.wait or element_effect(u) or str(u.target) == _LAYOUT_COPY]
        found += [u for u in passes_on if u not in found]
    return found


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
