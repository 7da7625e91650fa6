"""Repeats that are sent once, and sums that are sent in place of their terms. What looks alike stays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, Interpreter, Node

from tests.compiler.dags import Dag, aten, c10d, inputs_of, module_of
from ub_overlap.compiler.graph.aten import shape_of
from ub_overlap.compiler.joint.joint_decision import joint_decision
from ub_overlap.compiler.joint.repeats.repeat import Repeat
from ub_overlap.compiler.joint.repeats.send_once import may_send_once, send_once

CAST = torch.ops.prims.convert_element_type.default
RANKS, HEADS, REPEATS, POSITIONS, WIDTH = 4, 2, 3, 4, 5
ALL = HEADS * REPEATS
ROWS = ALL * POSITIONS * WIDTH
"""Elements of repeated keys."""
TO_NEXT, FROM_LAST = [0, 2 * ROWS, 0, 0], [0, 0, 0, 2 * ROWS]


class OneRank(Interpreter):
    """Runs a graph with stand-ins for collectives, which move and add up rows as they do."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        if target is c10d.all_gather_into_tensor.default:
            return torch.cat([x * (r + 1) for r in range(args[1])])
        if target is c10d.reduce_scatter_tensor.default:
            return sum(part * (r + 1) for r, part in enumerate(x.chunk(args[2])))
        if target is c10d.all_to_all_single.default:
            assert sum(args[2]) == len(x)
            return torch.cat([part * (r + 2) for r, part in enumerate(x.split(args[2]))])[: sum(args[1])]
        if target is c10d.all_reduce.default:
            return x * 3
        return x if target is c10d.wait_tensor.default else super().call_function(target, args, kwargs)


def run(graph: Graph) -> list[torch.Tensor]:
    return OneRank(module_of(graph)).run(*inputs_of(graph, 0))  # type: ignore[no-any-return]


def repeat(d: Dag, x: Node) -> Node:
    """[1, HEADS, S, E] -> [1, ALL, S, E]."""
    expanded = d.call(aten.expand.default, d.call(aten.unsqueeze.default, x, 2), [1, HEADS, REPEATS, POSITIONS, WIDTH])
    return d.call(aten.view.default, d.call(aten.clone.default, expanded), [1, ALL, POSITIONS, WIDTH])


def repeat_by_positions(d: Dag, x: Node) -> Node:
    """The same, repeated as [1, S, heads, E] and transposed: torchtitan's order."""
    apart = d.call(aten.unsqueeze.default, d.call(aten.transpose.int, x, 1, 2), 3)
    expanded = d.call(aten.expand.default, apart, [1, POSITIONS, HEADS, REPEATS, WIDTH])
    together = d.call(aten.view.default, d.call(aten.contiguous.default, expanded), [1, POSITIONS, ALL, WIDTH])
    return d.call(aten.clone.default, d.call(aten.transpose.int, together, 1, 2))


def flat(d: Dag, *tensors: Node) -> Node:
    rows = [d.call(aten.reshape.default, d.call(aten.clone.default, t), [ROWS]) for t in tensors]
    return d.call(aten.cat.default, rows)


def wait(d: Dag, node: Node) -> Node:
    return d.call(c10d.wait_tensor.default, node)


def rotate(d: Dag, rows: Node) -> Node:
    return wait(d, d.call(c10d.all_to_all_single.default, rows, FROM_LAST, TO_NEXT, "g"))


def keys(d: Dag, rows: Node) -> tuple[Node, Node]:
    shape = [1, ALL, POSITIONS, WIDTH]
    cut = [d.call(aten.slice.Tensor, rows, 0, *place) for place in ((0, ROWS), (ROWS, 2**63 - 1))]
    return d.call(aten.view.default, cut[0], shape), d.call(aten.view.default, cut[1], shape)


def attend(d: Dag, k: Node, v: Node) -> Node:
    """Read both: no passing on."""
    return d.call(aten.mul.Tensor, k, d.call(aten.exp.default, v))


def sum_heads(d: Dag, x: Node) -> Node:
    apart = d.call(aten.view.default, x, [1, HEADS, REPEATS, POSITIONS, WIDTH])
    return d.call(aten.squeeze.dim, d.call(aten.sum.dim_IntList, apart, [2], True), 2)


def through(d: Dag, x: Node, *ops: Any) -> list[Node]:
    for op in ops:
        x = d.call(op, x)
    return [x]


Form = Callable[[Dag, Node, Node], list[Node]]


def ring(d: Dag, k: Node, v: Node, how: Callable[[Dag, Node], Node] = repeat) -> list[Node]:
    """Two steps of a ring by all_to_alls, and what the own keys give."""
    k, v = how(d, k), how(d, v)
    read = [attend(d, k, v)]
    for _ in range(2):
        k, v = keys(d, rotate(d, flat(d, k, v)))
        read.append(attend(d, k, v))
    return read


def gathered_ring(d: Dag, k: Node, v: Node) -> list[Node]:
    """One gather, of which the shards of two ranks are read."""
    whole = d.gather(flat(d, repeat(d, k), repeat(d, v)))
    read = []
    for rank in (1, 3):
        split = d.call(aten.split.Tensor, whole, 2 * ROWS)
        part = d.graph.call_function(operator.getitem, (split, rank))
        part.meta["val"] = split.meta["val"][rank]
        read.append(attend(d, *keys(d, part)))
    return read


def cast(d: Dag, k: Node, v: Node) -> list[Node]:
    """Sent in another type."""
    wide = d.call(CAST, repeat(d, k), torch.float64)
    return [d.call(aten.exp.default, d.gather(wide))]


def by_positions(d: Dag, k: Node, v: Node) -> list[Node]:
    """Gathered along the positions: dim 0 of a permuted copy."""
    moved = d.call(aten.clone.default, d.call(aten.permute.default, repeat(d, k), [2, 0, 1, 3]))
    back = d.call(aten.permute.default, d.gather(moved), [1, 2, 0, 3])
    return [d.call(aten.exp.default, back)]


def size_read(d: Dag, k: Node, v: Node) -> list[Node]:
    """Only attention reads the result, and it is returned as well."""
    whole = d.gather(repeat(d, k))
    return [whole, d.call(aten.exp.default, whole)]


def backward(d: Dag, k: Node, group: str = "g", repeats: bool = True) -> Node:
    """Return what forward reads of repeated keys that it gathers. What follows in the graph is backward."""
    own = repeat(d, k)
    rows = d.call(c10d.all_gather_into_tensor.default, own if repeats else d.call(aten.exp.default, own), RANKS, group)
    read = d.call(aten.exp.default, wait(d, rows))
    read.meta["last of forward"] = True
    return read


def gradients(d: Dag, k: Node, v: Node) -> list[Node]:
    """Two steps of a ring whose gradients are sums over repeated heads in the end."""
    read = backward(d, k)
    dk, dv = (d.call(aten.exp.default, repeat(d, t)) for t in (k, v))  # exp: no repeats known
    rows = rotate(d, flat(d, dk, dv))
    for t in (dk, dv):
        place = (0, ROWS) if t is dk else (ROWS, 2 * ROWS)
        own = d.call(aten.view.default, d.call(aten.slice.Tensor, rows, 0, *place), [1, ALL, POSITIONS, WIDTH])
        added = d.call(aten.view.default, d.call(aten.add.Tensor, own, t), [ROWS])
        rows = d.call(aten.slice_scatter.default, rows, added, 0, *place)
    return [*(sum_heads(d, t) for t in keys(d, rotate(d, rows))), read]


def half_of_the_positions(d: Dag, k: Node, v: Node) -> list[Node]:
    """With load balance some steps give gradients for half of the positions: a place behind the heads."""
    read = backward(d, k)
    dk = d.call(aten.exp.default, repeat(d, k))
    other = d.call(aten.exp.default, repeat(d, v))
    half = d.call(aten.slice.Tensor, other, 2, 0, POSITIONS // 2)
    own = d.call(aten.slice.Tensor, dk, 2, 0, POSITIONS // 2)
    sent = d.call(aten.slice_scatter.default, dk, d.call(aten.add.Tensor, own, half), 2, 0, POSITIONS // 2)
    received = keys(d, rotate(d, flat(d, sent, other)))
    return [*(sum_heads(d, t) for t in received), read]


def scattered_gradients(d: Dag, k: Node, v: Node) -> list[Node]:
    """The gradient of a gather of repeated heads: a reduce_scatter along the positions."""
    read = backward(d, k)
    dk = d.call(aten.exp.default, d.call(aten.cat.default, [repeat(d, k)] * RANKS, 2))
    moved = d.call(aten.clone.default, d.call(aten.permute.default, dk, [2, 0, 1, 3]))
    return [sum_heads(d, d.call(aten.clone.default, d.call(aten.permute.default, d.scatter(moved), [1, 2, 0, 3]))), read]


def from_zeros(d: Dag, k: Node, v: Node) -> list[Node]:
    """Nothing attended: zeros travel, and are no sums of zeros afterwards."""
    read = backward(d, k)
    zeros = [d.call(aten.zeros_like.default, repeat(d, t)) for t in (k, v)]
    own = d.call(aten.exp.default, repeat(d, k))
    received = keys(d, rotate(d, flat(d, *zeros)))
    return [*(sum_heads(d, d.call(aten.add.Tensor, t, own)) for t in received), read]


def also_read_in_front(d: Dag, k: Node, v: Node) -> list[Node]:
    """The gradient is returned as well as sent."""
    read = backward(d, k)
    dk = d.call(aten.exp.default, repeat(d, k))
    dv = d.call(aten.exp.default, repeat(d, v))
    return [*(sum_heads(d, t) for t in keys(d, rotate(d, flat(d, dk, dv)))), dk, read]


def behind_an_all_reduce(d: Dag, k: Node, v: Node) -> list[Node]:
    """What is summed is waited for: tensor parallelism in front of the exchange."""
    read = backward(d, k)
    dk = d.call(c10d.all_reduce.default, d.call(aten.exp.default, repeat(d, k)), "sum", "tp")
    whole = d.call(aten.cat.default, [wait(d, dk)] * RANKS)
    return [sum_heads(d, d.scatter(whole)), read]


def gathered_repeats(d: Dag, k: Node) -> Node:
    """[4 ALL, S, E]"""
    return d.gather(d.call(aten.view.default, repeat(d, k), [ALL, POSITIONS * WIDTH]))


def part_of(target: Any, *args: Any) -> Form:
    """Return a form that reads part 1 of a split whose parts hold no whole repeats."""

    def form(d: Dag, k: Node, v: Node) -> list[Node]:
        split = d.call(target, gathered_repeats(d, k), *args)
        part = d.graph.call_function(operator.getitem, (split, 1))
        part.meta["val"] = split.meta["val"][1]
        return through(d, part, aten.exp.default)

    return form


SENT_ONCE: dict[str, tuple[Form, int]] = {
    "ring": (ring, 2),
    "ring, repeated between positions and width": (lambda d, k, v: ring(d, k, v, repeat_by_positions), 2),
    "gathered ring": (gathered_ring, 1),
    "cast": (cast, 1),
    "gathered by positions": (by_positions, 1),
    "returned": (size_read, 1),
    "a split of 4 heads": (part_of(aten.split.Tensor, 4), 1),
    "a split of 6, 4 and 14 heads": (part_of(aten.split_with_sizes.default, [6, 4, 14]), 1),
    "a chunk of 5 heads": (part_of(aten.chunk.default, 5), 1),
    "gradients": (gradients, 3),
    "gradients of half of the positions": (half_of_the_positions, 2),
    "scattered gradients": (scattered_gradients, 2),
    "gradients of zeros": (from_zeros, 2),
    "gradients that are returned as well": (also_read_in_front, 2),
    "gradients behind an all_reduce": (behind_an_all_reduce, 2),
}


def build(form: Form, dtype: torch.dtype = torch.float64) -> Graph:
    d = Dag(RANKS, dtype=dtype)
    k, v = (d.input(name, 1, HEADS, POSITIONS, WIDTH) for name in ("k", "v"))
    graph = d.output(*form(d, k, v))
    tag = "is_forward"
    for node in graph.nodes:
        node.meta["partitioner_tag"] = tag
        tag = "is_backward" if "last of forward" in node.meta else tag
    return graph


def collectives(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if "c10d" in str(n.target) and n.target is not c10d.wait_tensor.default]


def strides(t: torch.Tensor) -> list[int]:
    """Return the strides of the dims that matter."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def sent(graph: Graph) -> int:
    """Return the elements that collectives read."""
    ops = (c10d.all_to_all_single.default, c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default)
    return sum(n.args[0].meta["val"].numel() for op in ops for n in graph.find_nodes(op="call_function", target=op))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SENT_ONCE)
def test_what_is_repeated_is_sent_once(name: str) -> None:
    form, count = SENT_ONCE[name]
    graph = build(form)
    expected, before, number = run(graph), sent(graph), len(collectives(graph))
    assert may_send_once(graph) and send_once(graph) == count
    graph.lint()
    assert sent(graph) * REPEATS == before
    for found, wanted in zip(run(graph), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert strides(found) == strides(wanted)
    for node in graph.nodes:
        assert node.op == "output" or {"val", "partitioner_tag"} <= node.meta.keys(), node
    assert len(collectives(graph)) == number
    for node in collectives(graph):
        assert node.users and all(u.target is c10d.wait_tensor.default and u.users for u in node.users), "not waited for"
    assert send_once(graph) == 0, "nothing is left to do"


def test_what_is_reported() -> None:
    graph = build(gradients)
    send_once(graph)
    # The gather of forward sends 3/2 of a step of the ring: to 3 ranks, and keys only.
    assert send_once(build(gradients), 2 * ROWS * 8 // REPEATS + 1) == 1, "steps of the ring are worth less"
    assert send_once(build(gradients), 3 * ROWS * 8 // REPEATS + 1) == 0
    for node in graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default):
        decision = joint_decision(node)
        assert decision.saved_bytes == 2 * ROWS * 8 * (REPEATS - 1) // REPEATS
        assert f"{2 * ROWS * 8 // REPEATS} bytes instead of {2 * ROWS * 8}" in decision.change_note


def test_narrow_gradients_are_summed_in_fp32() -> None:
    """Gradients in bf16 that are added in fp32 are summed over their heads in fp32 too."""

    def accumulated(d: Dag, k: Node, v: Node) -> list[Node]:
        read = backward(d, k)
        dk, dv = (d.call(aten.exp.default, repeat(d, t)) for t in (k, v))
        zeros = d.call(CAST, d.call(aten.full.default, [1, ALL, POSITIONS, WIDTH], 1), torch.float32)
        received = keys(d, rotate(d, flat(d, *(d.call(aten.add.Tensor, zeros, t) for t in (dk, dv)))))
        return [*(sum_heads(d, t) for t in received), read]

    graph = build(accumulated, torch.bfloat16)
    expected = run(graph)
    assert send_once(graph) == 2
    for found, wanted in zip(run(graph), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert sums and all(n.meta["val"].dtype is torch.float32 for n in sums)


def test_a_sum_is_rounded_once() -> None:
    """torch's ring sends gradients in fp32, and rounds them behind the last step: now their sum is rounded."""

    def cast_to(dtype: torch.dtype) -> Form:
        def form(d: Dag, k: Node, v: Node) -> list[Node]:
            read = backward(d, k)
            wide = [d.call(CAST, d.call(aten.exp.default, repeat(d, t)), torch.float32) for t in (k, v)]
            return [*(sum_heads(d, t) for t in keys(d, d.call(CAST, rotate(d, flat(d, *wide)), dtype))), read]

        return form

    exact = run(build(cast_to(torch.float32), torch.bfloat16))
    graph = build(cast_to(torch.bfloat16), torch.bfloat16)
    traced = run(graph)
    assert send_once(graph) == 2
    error, before = (sum(float((a - b).abs().sum()) for a, b in zip(r, exact, strict=True)) for r in (run(graph), traced))
    assert 0 < error <= before


# --- what looks alike ---------------------------------------------------------------------------------------------------


def one_repeated(d: Dag, k: Node, v: Node) -> list[Node]:
    """Of what travels together one part is no repeat."""
    return [attend(d, *keys(d, rotate(d, flat(d, repeat(d, k), d.call(aten.exp.default, repeat(d, v))))))]


def tiled(d: Dag, k: Node, v: Node) -> list[Node]:
    """Heads 0, 1, 0, 1, ... instead of 0, 0, ...: no grouped heads. They are one repeat all the same."""
    whole = d.call(aten.expand.default, d.call(aten.unsqueeze.default, k, 1), [1, REPEATS, HEADS, POSITIONS, WIDTH])
    joined = d.call(aten.view.default, d.call(aten.clone.default, whole), [1, ALL, POSITIONS, WIDTH])
    return through(d, d.gather(d.call(aten.view.default, joined, [ROWS])), aten.exp.default)


def cut_within(d: Dag, k: Node, v: Node) -> list[Node]:
    """Parts that hold one repeat of a head go to different ranks."""
    rows = d.call(aten.view.default, repeat(d, k), [ROWS])
    head = ROWS // ALL
    parts = [head, 2 * head, 2 * head, head]
    return through(d, wait(d, d.call(c10d.all_to_all_single.default, rows, parts, parts, "g")), aten.exp.default)


def constant(d: Dag, k: Node, v: Node) -> list[Node]:
    """The gradient of a sum is one number, repeated. Its gather is fused with a matmul."""
    rows = d.call(aten.clone.default, d.call(aten.expand.default, d.call(aten.sum.default, k), [POSITIONS, WIDTH]))
    return [d.mm(d.gather(rows), d.t(d.call(aten.view.default, v, [HEADS * POSITIONS, WIDTH])))]


def of_gradients(form: Callable[[Dag, Node], list[Node]], **forward: Any) -> Form:
    """Return a form whose forward gathers repeated keys, and whose backward gathers what `form` makes of a gradient."""

    def built(d: Dag, k: Node, v: Node) -> list[Node]:
        read = backward(d, k, **forward)
        return [*form(d, d.call(aten.exp.default, repeat(d, v))), read]

    return built


def own(d: Dag, whole: Node) -> Node:
    return d.call(aten.slice.Tensor, whole, 0, 0, 1)


def read_otherwise(d: Dag, dk: Node) -> list[Node]:
    """The gradient of repeated heads is returned as well as their sum."""
    whole = d.gather(dk)
    return [sum_heads(d, own(d, whole)), whole]


def read_partly(d: Dag, dk: Node) -> list[Node]:
    """Of two parts of a message one is read otherwise: it would be sent twice."""
    whole = d.gather(dk)
    return [sum_heads(d, own(d, whole)), d.call(aten.exp.default, d.call(aten.slice.Tensor, whole, 0, 1, 2))]


def other_sums(d: Dag, dk: Node) -> list[Node]:
    """Two sums over other elements."""
    part = own(d, d.gather(dk))
    return [sum_heads(d, part), d.call(aten.sum.dim_IntList, part, [3])]


def multiplied(d: Dag, dk: Node) -> list[Node]:
    """The sum of a product is no product of sums."""
    part = own(d, d.gather(dk))
    return [sum_heads(d, d.call(aten.mul.Tensor, part, d.call(aten.exp.default, part)))]


def largest(d: Dag, dk: Node) -> list[Node]:
    """A maximum over ranks does not add up."""
    made = d.call(c10d.reduce_scatter_tensor.default, d.call(aten.cat.default, [dk] * RANKS), "max", RANKS, "g")
    return [sum_heads(d, wait(d, made))]


def widened(d: Dag, dk: Node) -> list[Node]:
    """Sent in fewer bits than it is summed in: sums would be rounded before they are sent."""
    return [sum_heads(d, d.call(CAST, own(d, d.gather(d.call(CAST, dk, torch.bfloat16))), torch.float32))]


def summed_in_more_bits(d: Dag, dk: Node) -> list[Node]:
    part = own(d, d.gather(d.call(CAST, dk, torch.bfloat16)))
    apart = d.call(aten.view.default, part, [1, HEADS, REPEATS, POSITIONS, WIDTH])
    total = d.graph.call_function(aten.sum.dim_IntList, (apart, [2]), {"dtype": torch.float32})
    with d.mode:
        total.meta["val"] = torch.empty(1, HEADS, POSITIONS, WIDTH)
    return [total]


def added_in_more_bits(d: Dag, dk: Node) -> list[Node]:
    part = own(d, d.gather(d.call(CAST, dk, torch.bfloat16)))
    return [sum_heads(d, d.call(aten.add.Tensor, part, d.call(CAST, dk, torch.float32)))]


def masked(d: Dag, dk: Node) -> list[Node]:
    """A sum of booleans is no boolean."""
    positive = d.call(aten.gt.Scalar, dk, 1)
    return [sum_heads(d, d.call(aten.add.Tensor, own(d, d.gather(positive)), dk))]


def of_a_number(d: Dag, dk: Node) -> list[Node]:
    total = d.call(aten.sum.default, d.gather(dk))
    return [d.call(aten.sum.dim_IntList, total, [-1])]


def no_collective(d: Dag, k: Node, v: Node) -> list[Node]:
    return [attend(d, repeat(d, k), repeat(d, v)), sum_heads(d, d.call(aten.exp.default, repeat(d, k)))]


def with_a_matmul(d: Dag, k: Node, v: Node) -> list[Node]:
    """A gather that is fused with a matmul hides all it sends."""
    return [d.mm(gathered_repeats(d, k), d.t(gathered_repeats(d, k)))]


def by_place(d: Dag, k: Node, v: Node) -> list[Node]:
    return [d.call(aten.as_strided.default, d.call(aten.slice.Tensor, gathered_repeats(d, k), 0, 6, 12), [4], [1], 121)]


def written(d: Dag, k: Node, v: Node) -> list[Node]:
    """What is repeated is written to in front of the gather: the clone holds what was there before."""
    buffer = d.call(aten.clone.default, k)
    own = repeat(d, buffer)
    d.call(aten.add_.Tensor, buffer, v)
    return [d.call(aten.exp.default, d.gather(own)), buffer]


def empty(d: Dag, k: Node, v: Node) -> list[Node]:
    none = d.call(aten.unsqueeze.default, d.call(aten.slice.Tensor, k, 2, 0, 0), 2)
    rows = d.call(aten.reshape.default, d.call(aten.expand.default, none, [1, HEADS, REPEATS, 0, WIDTH]), [ALL, 0])
    return [d.gather(rows)]


LEFT: dict[str, Form] = {
    "one part repeats": one_repeated,
    "cut within a repeat": cut_within,
    "one number": constant,
    "no collective": no_collective,
    "a matmul": with_a_matmul,
    "by place": by_place,
    "written": written,
    "empty": empty,
}
GRADIENTS_LEFT: dict[str, Callable[[Dag, Node], list[Node]]] = {
    "read otherwise": read_otherwise,
    "read partly": read_partly,
    "other sums": other_sums,
    "a product": multiplied,
    "a maximum": largest,
    "widened": widened,
    "summed in more bits": summed_in_more_bits,
    "added in more bits": added_in_more_bits,
    "masked": masked,
    "a number": of_a_number,
}
SUMMED = of_gradients(lambda d, dk: [sum_heads(d, own(d, d.gather(dk)))])


@pytest.mark.parametrize("name", GRADIENTS_LEFT)
def test_gradients_that_stay(name: str) -> None:
    """Forward's gather sends less. Backward's collective stays."""
    graph = build(of_gradients(GRADIENTS_LEFT[name]), torch.float32)
    expected, before = run(graph), [n.args[0].meta["val"].numel() for n in collectives(graph)]
    assert send_once(graph) == 1
    graph.lint()
    assert [n.args[0].meta["val"].numel() for n in collectives(graph)] == [before[0] // REPEATS, *before[1:]]
    assert all(map(torch.equal, run(graph), expected))


def test_sums_in_front_only_where_repeats_were_sent() -> None:
    """In forward, in another group, and where forward sent no repeats, a sum behind a collective stays."""
    assert send_once(build(SUMMED)) == 2
    assert send_once(build(of_gradients(lambda d, dk: [sum_heads(d, own(d, d.gather(dk)))], group="h"))) == 1
    assert send_once(build(of_gradients(lambda d, dk: [sum_heads(d, own(d, d.gather(dk)))], repeats=False))) == 0
    graph = build(SUMMED)
    for node in graph.nodes:
        node.meta["partitioner_tag"] = "is_forward"
    assert send_once(graph) == 1


@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name: str) -> None:
    graph = build(LEFT[name])
    before = str(graph)
    assert send_once(graph) == 0 and str(graph) == before


def test_tiled_heads() -> None:
    """Heads that are repeated as a whole are sent once too."""
    graph = build(tiled)
    expected, before = run(graph), sent(graph)
    assert send_once(graph) == 1 and sent(graph) * REPEATS == before
    assert all(map(torch.equal, run(graph), expected))


@pytest.mark.parametrize(
    ("shape", "repeat", "as_shape", "found"),
    [
        ((1, 6, 4, 5), Repeat(1, 3), (120,), Repeat(0, 3, 20)),
        ((120,), Repeat(0, 3, 20), (1, 6, 4, 5), Repeat(1, 3)),
        ((2, 60), Repeat(1, 3, 20), (120,), Repeat(0, 3, 20)),
        ((1, 2, 3, 4, 5), Repeat(2, 3), (6, 20), Repeat(0, 3)),
        ((120,), Repeat(0, 3, 20), (40, 3), None),
        ((120,), Repeat(0, 3, 20), (12, 10), Repeat(0, 3, 2)),
        ((6, 4), Repeat(1, 4), (24,), Repeat(0, 4)),
        ((6, 4), Repeat(0, 6), (3, 8), None),
        ((6, 1, 4), Repeat(0, 3), (1, 6, 4), Repeat(1, 3)),
    ],
)
def test_views(shape: tuple[int, ...], repeat: Repeat, as_shape: tuple[int, ...], found: Repeat | None) -> None:
    assert repeat.viewed(shape, as_shape) == found
    if found is not None:
        assert found.viewed(as_shape, shape) == repeat, "views of views"


def test_views_of_all_shapes() -> None:
    """The repeat of a view is where equal elements are."""
    shapes = [(24,), (2, 12), (4, 6), (2, 3, 4), (3, 2, 2, 2), (1, 24), (6, 1, 4)]
    for shape in shapes:
        for as_shape in shapes:
            for dim, size in enumerate(shape):
                for count in (2, 3, 4, 6):
                    if size % count == 0:
                        value = torch.arange(24 // count).reshape(Repeat(dim, count).shape_without(shape))
                        value = value.repeat_interleave(count, dim)
                        found = Repeat(dim, count).viewed(shape, as_shape)
                        if found is not None:
                            viewed = value.reshape(as_shape).reshape(found.shape_apart(as_shape))
                            first = viewed.narrow(found.dim + 1, 0, 1)
                            assert torch.equal(viewed, first.expand_as(viewed)), (shape, as_shape, dim, count)


def test_shapes_of_nodes() -> None:
    d = Dag(RANKS)
    k = d.input("k", 1, HEADS, POSITIONS, WIDTH)
    assert shape_of(repeat(d, k)) == (1, ALL, POSITIONS, WIDTH)
