"""Steps of a ring that backward repeats: one exchange is left of two, and what looks alike stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.fx import Graph, Node

from tests.compiler.dags import Dag, aten, c10d
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.graph.aten import read_cut
from ub_overlap.compiler.joint.merge.merge_collectives import may_merge, merge_collectives
from ub_overlap.compiler.joint.merge.merge_exchanges import merge_exchanges
from ub_overlap.compiler.match.collectives import find_collectives

ROWS, TO_THE_END = 16, 2**63 - 1
FROM_LAST, TO_NEXT = [0, 0, 0, ROWS], [0, ROWS, 0, 0]
Half = tuple[int, int]
Repeat = Callable[[Dag, Node, Node], list[Node]]


def step(d: Dag, rows: Node, source: list[int] | None = None, target: list[int] | None = None, group: str = "g") -> Node:
    exchanged = d.call(c10d.all_to_all_single.default, rows, source or FROM_LAST, target or TO_NEXT, group)
    return d.call(c10d.wait_tensor.default, exchanged)


def ring(d: Dag, k: Node, v: Node, half: Half = (ROWS // 2, ROWS), steps: int = 2, **exchange: Any) -> list[Node]:
    """Append `steps` steps of a ring and what reads them. `half`: the slice that is v."""
    read = []
    for _ in range(steps):
        received = step(d, d.call(aten.cat.default, [k, v]), **exchange)
        k = d.call(aten.slice.Tensor, received, 0, 0, ROWS // 2)
        v = d.call(aten.slice.Tensor, received, 0, *half)
        read.append(d.call(aten.add.Tensor, k, v))
    return read


def overwritten(d: Dag, k: Node, v: Node) -> list[Node]:
    d.call(aten.mul_.Tensor, k, 0.5)
    return ring(d, k, v)


def result_overwritten(d: Dag, k: Node, v: Node) -> list[Node]:
    """What backward received is written to: forward's result must not change."""
    first = ring(d, k, v, steps=1)
    received = next(n for n in reversed(d.graph.nodes) if n.target is c10d.wait_tensor.default)
    d.call(aten.mul_.Tensor, received, 0.5)
    return [*first, d.call(aten.add.Tensor, received, received)]


def returned(d: Dag, k: Node, v: Node) -> list[Node]:
    ring(d, k, v, steps=1)
    return [n for n in d.graph.nodes if n.target is c10d.wait_tensor.default][-1:]


def even(d: Dag, k: Node, v: Node) -> list[Node]:
    """Every rank sends to every rank, in both places."""
    rows = d.call(aten.cat.default, [k, v])
    parts = [ROWS // 4] * 4
    return [d.call(aten.neg.default, step(d, rows, parts, parts)) for _ in range(2)]


def random(d: Dag, k: Node, v: Node) -> list[Node]:
    """Equal ops that draw other numbers."""
    return [n for _ in range(2) for n in ring(d, d.call(aten.rrelu.default, k, 0.1, 0.3, True), v, steps=1)]


def typed(d: Dag, k: Node, v: Node) -> list[Node]:
    """1 and 1.0 are equal numbers of two types."""
    return [n for one in (1, 1.0) for n in ring(d, d.call(aten.add.Tensor, k, one), v, steps=1)]


REPEATS: dict[str, tuple[Repeat, int]] = {
    "equal": (lambda d, k, v: ring(d, k, v, (ROWS // 2, TO_THE_END)), 2),
    "other end of a slice": (ring, 2),
    "past the end": (lambda d, k, v: ring(d, k, v, (ROWS // 2, ROWS + 1)), 2),
    "from the end": (lambda d, k, v: ring(d, k, v, (-ROWS // 2, ROWS)), 2),
    "fewer steps": (lambda d, k, v: ring(d, k, v, steps=1), 1),
    "other slice": (lambda d, k, v: ring(d, k, v, (0, ROWS // 2)), 1),
    "swapped": (lambda d, k, v: ring(d, v, k), 0),
    "other tensor": (lambda d, k, v: ring(d, d.call(aten.neg.default, k), v), 0),
    "other target": (lambda d, k, v: ring(d, k, v, target=[0, 0, ROWS, 0]), 0),
    "other source": (lambda d, k, v: ring(d, k, v, source=[0, 0, ROWS, 0]), 0),
    "other group": (lambda d, k, v: ring(d, k, v, group="h"), 0),
    "overwritten": (overwritten, 0),
    "result overwritten": (result_overwritten, 0),
    "returned": (returned, 0),
    "no permutation": (even, 0),
    "random": (random, 0),
    "typed": (typed, 0),
}


def twice(repeat: Repeat) -> tuple[Graph, int]:
    """Return a graph with two steps of a ring and a repetition, and the number of its exchanges."""
    d = Dag(4)
    k, v = d.input("k", ROWS // 2), d.input("v", ROWS // 2)
    graph = d.output(*ring(d, k, v, (ROWS // 2, TO_THE_END)), *repeat(d, k, v))
    return graph, count(graph)


def count(graph: Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default))


@pytest.mark.parametrize("steps", [2, 3])
def test_a_step_that_stays_keeps_its_wait(steps: int) -> None:
    """The first repeated step is returned, and only the second one reads it, which is merged."""

    def first_returned(d: Dag, k: Node, v: Node) -> list[Node]:
        unread, *read = ring(d, k, v, steps=steps)
        received = [n for n in d.graph.nodes if n.target is c10d.wait_tensor.default][-steps]
        d.graph.erase_node(unread)
        return [*read, received]

    d = Dag(4)
    k, v = d.input("k", ROWS // 2), d.input("v", ROWS // 2)
    graph = d.output(*ring(d, k, v, (ROWS // 2, TO_THE_END), steps), *first_returned(d, k, v))
    merge_collectives(graph)
    graph.lint()
    exchanges = graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
    assert len(exchanges) == steps + 1
    assert all(u.target is c10d.wait_tensor.default for n in exchanges for u in n.users) and all(n.users for n in exchanges)


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_steps(name: str) -> None:
    """A step goes if its rows, its peers and its group are those of an earlier one; so does what only it has read."""
    repeat, merged = REPEATS[name]
    graph, before = twice(repeat)
    assert merge_collectives(graph) == merged and count(graph) == before - merged
    graph.lint()
    if merged == 2:
        assert len(graph.find_nodes(op="call_function", target=aten.cat.default)) == 2
        results = graph.output_node().all_input_nodes
        read = [[cut.args for cut in result.all_input_nodes] for result in results]
        assert read[:2] == read[2:], "both halves spell their slices alike, as torch merges equal nodes only"


def test_a_slice_from_before_the_start() -> None:
    """torch takes the start for 0."""
    d = Dag(4)
    cut = d.call(aten.slice.Tensor, d.input("x", ROWS), 0, -2 * ROWS, ROWS // 2)
    assert read_cut(cut) == (cut.args[0], 0, 0, ROWS // 2)


def test_a_graph_that_repeats_nothing() -> None:
    d = Dag(4)
    graph = d.output(*ring(d, d.input("k", ROWS // 2), d.input("v", ROWS // 2), steps=1))
    assert not may_merge(graph) and merge_collectives(graph) == 0 and may_merge(twice(ring)[0])


AGAIN = {"recompute": compat.CheckpointPolicy.MUST_RECOMPUTE}
FORWARD, BACKWARD = {"partitioner_tag": "is_forward"}, {"partitioner_tag": "is_backward"}
REGIONS = {
    "forward, backward": (FORWARD, BACKWARD, 1),
    "a checkpoint, its backward": (FORWARD | AGAIN | {"ac_graph_id": 1}, BACKWARD, 1),
    "forward, forward": (FORWARD, FORWARD, 1),
    "one checkpoint": (FORWARD | AGAIN | {"ac_graph_id": 1}, FORWARD | AGAIN | {"ac_graph_id": 1}, 1),
    "two checkpoints": (FORWARD | AGAIN | {"ac_graph_id": 1}, FORWARD | AGAIN | {"ac_graph_id": 2}, 0),
    "forward, a checkpoint": (FORWARD, FORWARD | AGAIN | {"ac_graph_id": 1}, 0),
    "a checkpoint, forward": (FORWARD | AGAIN | {"ac_graph_id": 1}, FORWARD, 0),
    "forward, recomputed in backward": (FORWARD, BACKWARD | AGAIN, 0),
    "backward, forward": (BACKWARD, FORWARD, 0),
}


@pytest.mark.parametrize("name", REGIONS)
def test_regions(name: str) -> None:
    """Backward reads what its forward received, or runs it again where the user asks for that: the mark stays.

    Steps of two regions stay apart.
    """
    first, second, merged = REGIONS[name]
    graph, _ = twice(lambda d, k, v: ring(d, k, v, steps=1))
    exchanges = [c.node for c in find_collectives(graph)]
    for node, meta in zip(exchanges, (first, first, second), strict=True):
        node.meta |= meta
    assert merge_collectives(graph) == merged
    assert all(exchanges[0].meta[key] == value for key, value in first.items())
    assert ("recompute" in exchanges[0].meta) == ("recompute" in first)


def test_a_third_step_finds_its_own_region() -> None:
    """The second of three equal steps is in another region than the first, the third in the region of the second."""
    graph, _ = twice(lambda d, k, v: [*ring(d, k, v, steps=1), *ring(d, k, v, steps=1)])
    exchanges = find_collectives(graph)
    for c in exchanges[2:]:
        c.node.meta |= AGAIN | {"ac_graph_id": 1}
    assert merge_exchanges(graph, exchanges) == 1
    assert [c.node for c in find_collectives(graph)] == [c.node for c in exchanges[:3]]


def gathered(d: Dag, k: Node, v: Node) -> Node:
    """Append the gather of a ring, and return what reads it."""
    rows = d.call(aten.cat.default, [d.call(aten.clone.default, k), v])
    gather = d.call(c10d.all_gather_into_tensor.default, rows, 4, "g")
    return d.call(aten.neg.default, d.call(c10d.wait_tensor.default, gather))


def gathered_twice(*metas: dict[str, Any], joint: bool = True) -> tuple[Graph, list[Node]]:
    """Return a graph with equal gathers of these regions, a gradient in front of the last of them, and the gathers."""
    d = Dag(4)
    k, v = d.input("k", ROWS // 2), d.input("v", ROWS // 2)
    results = [gathered(d, k, v) for _ in metas[1:]]
    results.append(d.call(aten.neg.default, d.input("tangents_1" if joint else "y", ROWS)))
    graph = d.output(*results, gathered(d, k, v))
    gathers = [c.node for c in find_collectives(graph)]
    for node, meta in zip(gathers, metas, strict=True):
        node.meta |= meta
    return graph, gathers


def are_left(graph: Graph, gathers: list[Node], *numbers: int) -> None:
    """Merge, and check that the gathers of these numbers are left."""
    assert merge_collectives(graph) == len(gathers) - len(numbers)
    graph.lint()
    assert [c.node for c in find_collectives(graph)] == [gathers[i] for i in numbers]


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        (FORWARD, BACKWARD, True),
        (FORWARD | AGAIN | {"ac_graph_id": 1}, BACKWARD, True),
        (FORWARD, {}, True),  # of a user's autograd function
        (FORWARD, FORWARD, False),
        (FORWARD, BACKWARD | AGAIN, False),
        (FORWARD, FORWARD | AGAIN | {"ac_graph_id": 1}, False),
    ],
)
def test_gathers_that_backward_repeats(first: dict[str, Any], second: dict[str, Any], merged: bool) -> None:
    """They gather equal values, from other tensors."""
    graph, gathers = gathered_twice(first, second)
    assert may_merge(graph) or not merged
    are_left(graph, gathers, *([0] if merged else [0, 1]))


def test_gathers_of_one_half_stay() -> None:
    """Where backward repeats a gather too, two of forward stay: a memory limit would apply to them."""
    are_left(*gathered_twice(FORWARD, FORWARD, BACKWARD), 0, 1)


def test_a_whole_step_gathers_again() -> None:
    """It has no tangents and no partitioner: backward gathers again because the user wants it to."""
    graph, gathers = gathered_twice(FORWARD, BACKWARD, joint=False)
    assert not may_merge(graph)
    are_left(graph, gathers, 0, 1)


def test_a_gather_of_gradients() -> None:
    """It looks like one of forward, and no tensor of it is known there."""
    d = Dag(4)
    k, v, gradient = d.input("k", ROWS // 2), d.input("v", ROWS // 2), d.input("tangents_1", ROWS // 2)
    graph = d.output(gathered(d, k, v), gathered(d, gradient, v))
    for c, meta in zip(find_collectives(graph), (FORWARD, BACKWARD), strict=True):
        c.node.meta |= meta
    assert not may_merge(graph) and merge_collectives(graph) == 0
