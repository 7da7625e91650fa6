"""Take the weight gradients of a backward graph into a graph of their own, which runs later.

    before   tangents, saved -> mm(d_out, w2) -> gelu' -> mm(.., w1) -> gradient of the input
                                mm(d_out.T, h), mm(gelu'.T, x)       -> gradients of w2, w1

    first    tangents, saved -> mm(d_out, w2) -> gelu' -> mm(.., w1) -> gradient of the input; d_out and gelu' as values
    second   h, x, values    -> mm(d_out.T, h), mm(gelu'.T, x)       -> gradients of w2, w1

The first graph has everything that another output than a deferred gradient needs, and all writes. A view of a value is computed
again in the second graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ub_overlap import _aot_compat
from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.deferred_gradients import DeferredOutput, TwoPartBackward

from ..graph.aten import alias_base, is_mutable, storage_node, tensor_of


@dataclass(frozen=True, slots=True)
class BackwardParts:
    """The two graphs. `kept`: positions of the inputs that the second reads. `values`: nodes whose values it reads."""

    first: GraphModule
    second: GraphModule
    kept: tuple[int, ...]
    values: tuple[Node, ...]
    results: int
    deferred: tuple[DeferredOutput, ...]

    def joined(self, first: Callable[..., Any], second: Callable[..., Any]) -> TwoPartBackward:
        """Return the whole backward from the compiled graphs."""
        return TwoPartBackward(first, second, self.kept, self.results, self.deferred)


def separate_weight_gradients(gm: GraphModule, parameters: Sequence[int]) -> BackwardParts | None:
    """Return a backward graph in two parts, or None where no gradient can be deferred.

    `parameters`: positions of the model's parameters among the inputs of Dynamo's graph. `gm` becomes the first part.
    """
    graph = gm.graph
    outputs: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    positions = _gradients_of(graph, outputs, frozenset(parameters))
    roots = [n for i, n in enumerate(outputs) if i not in positions and isinstance(n, Node)]
    writes = [n for n in graph.nodes if is_mutable(n)]
    first = _ancestors([*roots, *writes])
    positions = {i for i in positions if outputs[i] not in first}
    if not positions:
        return None
    deferred = sorted(positions)
    second = _ancestors([outputs[i] for i in deferred]) - first
    builder = _Second(graph, second)
    gradients = [builder.copied(outputs[i]) for i in deferred]
    written = {storage_node(argument) for n in writes for argument in n.all_input_nodes}
    read = {storage_node(n) for n in (*builder.kept, *builder.values)}
    if written & read:
        return None  # the second graph would read what the first has overwritten
    second_gm = builder.finish(gm, gradients, [_desc(graph, i) for i in deferred])
    placeholders = list(graph.find_nodes(op="placeholder"))
    results = [_apart(n, read) for i, n in enumerate(outputs) if i not in positions]
    info = tuple(_deferred_output(i, outputs[i]) for i in deferred)
    _return(graph, [*results, *builder.values], [_desc(graph, i) for i in range(len(outputs)) if i not in positions])
    for node in reversed([n for n in graph.nodes if n in second and n.op != "placeholder"]):
        graph.erase_node(node)
    graph.lint()
    gm.recompile()
    kept = tuple(placeholders.index(n) for n in builder.kept)
    return BackwardParts(gm, second_gm, kept, tuple(builder.values), len(results), info)


def _gradients_of(graph: Graph, outputs: Sequence[Any], parameters: frozenset[int]) -> set[int]:
    """Return the positions of outputs that are gradients of parameters, of static sizes."""
    return {
        i
        for i, node in enumerate(outputs)
        if isinstance(node, Node)
        and node.op == "call_function"
        and _aot_compat.gradient_of(_desc(graph, i)) in parameters
        and isinstance(value := node.meta.get("val"), torch.Tensor)
        and all(isinstance(size, int) and size > 0 for size in value.shape)
        and sum(other is node for other in outputs) == 1
    }


def _desc(graph: Graph, position: int) -> Any:
    descs = graph.output_node().meta.get("desc") or ()
    return descs[position] if position < len(descs) else None


def _deferred_output(position: int, node: Node) -> DeferredOutput:
    value = node.meta["val"]
    return DeferredOutput(position, tuple(value.shape), value.dtype, value.device)


def _ancestors(roots: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        if (node := stack.pop()) not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _apart(node: Any, read: set[Node]) -> Any:
    """Return an output of the first graph in memory that the second does not read.

    autograd adds the next microbatch's gradient to that of a parameter in place, and that may be before the second graph runs.
    """
    if not isinstance(node, Node) or storage_node(node) not in read or tensor_of(node) is None:
        return node
    with node.graph.inserting_before(node.graph.output_node()):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _is_view(node: Node) -> bool:
    """Return whether `node` is a view that costs nothing to compute again."""
    return isinstance(node.target, compat.OpOverload) and node.target.namespace == "aten" and alias_base(node) is not None


class _Second:
    """Builds the second graph: the nodes in `own`, and what they read as placeholders."""

    def __init__(self, graph: Graph, own: set[Node]) -> None:
        self.own = set(own)
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.kept: list[Node] = []
        self.values: list[Node] = []

    def copied(self, node: Node) -> Node:
        """Note what `node` needs. Return it."""
        stack, seen = [node], set()
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            if self._is_computed(one):
                self.own.add(one)
                stack.extend(one.all_input_nodes)
            elif one.op == "placeholder" and one not in self.kept:
                self.kept.append(one)
            elif one.op != "placeholder" and one not in self.values:
                self.values.append(one)
        return node

    def _is_computed(self, node: Node) -> bool:
        return (node in self.own and node.op != "placeholder") or node.op == "get_attr" or _is_view(node)

    def finish(self, gm: GraphModule, gradients: Sequence[Node], descs: Sequence[Any]) -> GraphModule:
        """Return the graph of the collected nodes, in their order."""
        graph = Graph()
        made: dict[Node, Node] = {}
        for number, node in enumerate((*self.kept, *self.values)):
            # The name marks the graph as one of backward (passes.phase_of, Inductor's count_tangents).
            made[node] = graph.placeholder(f"tangents_{number}" if node not in self.kept else node.name)
            made[node].meta = dict(node.meta)
        for node in sorted((n for n in self.own if n.op != "placeholder"), key=self.order.__getitem__):
            made[node] = graph.node_copy(node, made.__getitem__)
        output = graph.output(tuple(made[n] for n in gradients))
        output.meta["desc"] = list(descs)
        graph.lint()
        return GraphModule(gm, graph)


def _return(graph: Graph, nodes: Sequence[Any], descs: Sequence[Any]) -> None:
    """Let `graph` return `nodes`, of which the first have `descs`."""
    output = graph.output_node()
    output.args = (tuple(nodes),)
    output.meta = {**output.meta, "desc": [*descs, *[None] * (len(nodes) - len(descs))]}
    output.meta.pop("val", None)
