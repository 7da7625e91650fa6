"""The window of a collective: where a graph lets it start and finish, if it is split in two.

    source -> lead -> collective -> wait -> trail -> readers

The lead are the casts and views in front of the collective, the trail those behind it. They move with the start and with the
finish. So the gather of a parameter may start anywhere before its first reader, and the reduction of a gradient may finish as
late as the graph. Nothing else moves. Writes to the memory that is sent bound the window on both sides, as do calls of
subgraphs that communicate: their split collectives use the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..graph.aten import (
    CUTS,
    aten,
    c10d,
    constant_scaling,
    dtype_of,
    element_effect,
    is_elementwise,
    is_mutable,
    node_arg,
    readers,
    shape_of,
    storage_node,
    subgraphs_of,
    tensor_of,
)
from ..graph.sizes import Size, is_same, is_same_shape, numel
from ..joint.joint_decision import joint_decision
from .all_to_all import is_permute, split_nodes
from .collectives import Collective, Op, is_collective
from .fusion_order import FusionOrder
from .widening_cast import moved_tensors

_Lead = tuple[tuple[Node, ...], tuple[Node, ...]]
"""(lead, sources) of a window."""


@dataclass(frozen=True, slots=True)
class Window:
    """The nodes around one collective that bound its start and its finish."""

    collective: Collective
    lead: tuple[Node, ...]
    """Casts and views between the sources and the collective."""
    sources: tuple[Node, ...]
    """What the lead reads, and the numbers of rows of an all_to_all."""
    trail: tuple[Node, ...]
    """Casts, views and scalings of the result, and its sum with a gradient that the graph takes."""
    readers: tuple[Node, ...]
    """The first nodes that compute with the result, or return it."""
    writes: tuple[Node, ...]
    """Nodes that write to the memory that is sent, or to what it is made of."""
    calls: tuple[Node, ...] = ()
    """Calls of subgraphs that communicate."""
    bucket: tuple[Window, ...] = ()
    """The windows of further collectives that are sent together with this one (windows/buckets.py)."""

    @property
    def each(self) -> tuple[Window, ...]:
        """The windows of all collectives that are sent together, of which this is the first."""
        return (self, *self.bucket)

    def is_at_the_edge(self, parameters: Collection[Node] | None) -> bool:
        """Return whether it gathers a parameter, or reduces what only the graph's output reads: as data parallelism does.

        `parameters`: the placeholders of parameters; None where they are not known, then all that may be one.
        """
        if self.collective.op is not Op.ALL_GATHER:
            return all(n.op == "output" for n in self.readers)
        tensors = [n for n in self.sources if not _is_scale(n)]
        if parameters is not None:
            return all(n in parameters for n in tensors)
        return all(n.op == "placeholder" and n.name.startswith(("primals", "arg")) for n in tensors)

    @property
    def may_differ_by_rank(self) -> bool:
        """Return whether what other ranks read, and compute until then, may be something else: in a ring.

        There the rank is a constant of the graph. It reads shards by number, or permutes tensors.
        """
        c = self.collective
        if c.op is Op.ALL_TO_ALL:
            return is_permute(c)
        return c.op is Op.ALL_GATHER and (not self.readers or _reads_some_shards((*self.trail, *self.readers), c.ranks))

    def bounds(self, order: FusionOrder, moving: Mapping[Node, object]) -> tuple[int, int]:
        """Return (first, last) positions in `order`: start and finish stand before the items at positions in this range.

        `moving`: the waits and trails of windows. What they feed does not move in front of them.
        """
        first, last = self._common_bounds(order, moving)
        return min(first, last), last

    def is_open(self, order: FusionOrder, moving: Mapping[Node, object]) -> bool:
        """Return whether there is a place for both the start and the finish of all that is sent together."""
        first, last = self._common_bounds(order, moving)
        return first <= last

    def _common_bounds(self, order: FusionOrder, moving: Mapping[Node, object]) -> tuple[int, int]:
        """Return the latest first and the earliest last position of all that is sent together."""
        ranges = [w._own_bounds(order, moving) for w in self.each]
        return max(first for first, _ in ranges), min(last for _, last in ranges)

    def _own_bounds(self, order: FusionOrder, moving: Mapping[Node, object]) -> tuple[int, int]:
        own = order.position[self.collective.node]
        fixed = [*self.sources, *(n for n in self.lead if n in order.taken)]
        first = max([order.begin, *(order.span(n)[1] + 1 for n in fixed)])
        if any(n in moving for n in (*self.sources, *self.lead)):
            first = max(first, own)
        last = min([order.span(node)[0] for node in self.readers], default=len(order.items) - 1)
        for barrier in (*self.writes, *self.calls):
            at = order.position[barrier]
            first, last = (max(first, at + 1), last) if at < own else (first, min(last, at))
        return min(first, last), last


class WindowFinder:
    """Finds the windows of the collectives of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._writes = [(n, {storage_node(i) for i in n.all_input_nodes}) for n in graph.nodes if is_mutable(n)]
        self._calls = tuple(n for n in graph.nodes if any(map(_communicates, subgraphs_of(n))))

    def find(self, c: Collective) -> Window:
        """Return the window of `c`, which has a wait."""
        assert c.wait is not None
        lead, sources = _lead_of_cast(c) or _lead_of(c)
        trail, first_readers = _trail_of(c.wait)
        accumulated = [other for n in trail if (other := _accumulator(n)) is not None]
        if c.op is Op.ALL_TO_ALL:
            sources = (*sources, *(n for n in split_nodes(c) if n not in sources))
        memory = {storage_node(n) for n in (*lead, *sources, *accumulated)}
        writes = tuple(n for n, bases in self._writes if bases & memory)
        return Window(c, lead, sources, trail, first_readers, writes, self._calls)


def _communicates(graph: Graph) -> bool:
    """Return whether a subgraph has collectives, or ops that have replaced them, in whatever depth."""
    return any(
        is_collective(n) or getattr(n.target, "namespace", "") == "ub_overlap" or any(map(_communicates, subgraphs_of(n)))
        for n in graph.nodes
        if n.op == "call_function"
    )


def _lead_of(c: Collective) -> _Lead:
    """Return the nodes that only move or cast what `c` sends, in graph order, and what they read."""
    widening = set(c.widening.nodes) if c.widening else set()
    return _walk_back(c.input, lambda n: n in widening or element_effect(n) is not None or bool(moved_tensors(n)))


def _lead_of_cast(c: Collective) -> _Lead | None:
    """Return the same for an input of the graph that is cast to float8 and gathered; None for others.

    The cast computes with a scale, so it does more than `_lead_of` follows. It is as ready as the amax of the input.
    """
    if c.op is not Op.ALL_GATHER or dtype_of(c.input).itemsize != 1:
        return None
    found = _walk_back(c.input, lambda n: n.target is not c10d.wait_tensor.default and is_elementwise(n))
    return found if all(n.op == "placeholder" or _is_scale(n) for n in found[1]) else None


def _walk_back(node: Node, is_lead: Callable[[Node], bool]) -> _Lead:
    todo, lead, sources = [node], set[Node](), set[Node]()
    while todo:
        node = todo.pop()
        if node in lead or node in sources:
            continue
        if is_lead(node):
            lead.add(node)
            todo += node.all_input_nodes
        else:
            sources.add(node)
    return tuple(sorted(lead)), tuple(sorted(sources))


def _is_scale(node: Node) -> bool:
    """Return whether `node` is the amax of tensors over ranks: the input of float8 scales."""
    return node.target is c10d.wait_tensor.default and joint_decision(node_arg(node)).carries_scales


def _trail_of(wait: Node) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return the nodes that only move, cast or scale the result, in graph order, and the first other readers."""
    inside, others = {wait: None}, dict[Node, None]()
    todo = set(readers(wait))
    while todo:
        node = min(todo)  # the first in graph order: what it reads was seen before
        todo.remove(node)
        gives_size = any(user.target is aten.sym_size.int for user in node.users)  # to nodes that do not move
        if not gives_size and all(source in inside for source in _passed(node) or (None,)):
            inside[node] = None
            todo.update(n for n in readers(node) if n not in inside and n not in others)
        else:
            others[node] = None
    return tuple(n for n in inside if n is not wait), tuple(others)


def _reads_some_shards(nodes: Sequence[Node], ranks: int) -> bool:
    """Return whether `nodes`, in graph order, cut a gathered tensor into its shards and use some of them only.

    What is cut behind an expand are repeated tensors: their parts are no shards.
    """
    repeated = set[Node]()
    for node in nodes:
        repeats = node.target is aten.expand.default and element_effect(node) is None
        if repeats or any(i in repeated for i in node.all_input_nodes):
            repeated.add(node)
    nodes = [n for n in nodes if n not in repeated]
    for node in nodes:
        if node.target in CUTS and len(node.meta["val"]) == ranks:
            return len([u for u in node.users if u.users]) < ranks
    shards = [n for n in nodes if n.target is aten.slice.Tensor and is_same(_size(n) * ranks, _size(node_arg(n)))]
    return 0 < len(shards) < ranks


def _size(node: Node) -> Size:
    return numel(shape_of(node))


def _passed(node: Node) -> list[Node]:
    """Return the tensors whose elements `node` moves, repeats, casts, scales or adds to a gradient; none for other nodes.

    A tensor of whose sizes `node` makes a new one counts too: compiled autograd copies gradients into such.
    """
    effect = element_effect(node)
    if effect is not None:
        return [effect.source]
    if constant_scaling(node) or node.target is aten.new_empty_strided.default:
        return node.all_input_nodes
    accumulator = _accumulator(node)
    if accumulator is not None:
        return [n for n in node.all_input_nodes if n is not accumulator]
    return [node_arg(node)] if node.target is aten.expand.default else moved_tensors(node)


def _accumulator(node: Node) -> Node | None:
    """Return the input of the graph to which `node` adds a tensor of the same shape: the gradient of earlier microbatches.

    Compiled autograd traces this sum; AOTAutograd alone leaves it to autograd.
    """
    if node.target is not aten.add.Tensor or not all(isinstance(a, Node) for a in node.args):
        return None
    tensors = [n for n in node.all_input_nodes if tensor_of(n) is not None]
    if len(tensors) != 2 or not all(is_same_shape(shape_of(n), shape_of(node)) for n in tensors):
        return None
    inputs = [n for n in tensors if n.op == "placeholder"]
    return inputs[0] if len(inputs) == 1 else None


def moving_nodes(windows: Iterable[Window]) -> dict[Node, Window]:
    """Return the nodes that move with the finishes of `windows`."""
    each = [w for window in windows for w in window.each]
    return {node: w for w in each for node in (w.collective.wait, *w.trail) if node is not None}
