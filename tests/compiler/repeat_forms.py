"""Graphs whose collectives send repeated elements, or gradients of them, and graphs that look alike."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from tests.compiler.dags import Dag, aten, c10d

CAST = torch.ops.prims.convert_element_type.default
RANKS, HEADS, REPEATS, POSITIONS, WIDTH = 4, 2, 3, 4, 5
ALL = HEADS * REPEATS
ROWS = ALL * POSITIONS * WIDTH
"""Elements of repeated keys."""
TO_NEXT, FROM_LAST = [0, 2 * ROWS, 0, 0], [0, 0, 0, 2 * ROWS]


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


def read_by_a_view(d: Dag, k: Node, v: Node) -> list[Node]:
    """torchtitan's order: the gradient arrives permuted, and its sum is viewed as rows of a matmul."""
    read = backward(d, k)
    dk = d.call(aten.clone.default, d.call(aten.transpose.int, d.call(aten.exp.default, repeat(d, k)), 1, 2))
    received = d.call(aten.transpose.int, d.scatter(d.call(aten.cat.default, [dk] * RANKS)), 1, 2)
    apart = d.call(aten.view.default, received, [1, HEADS, REPEATS, POSITIONS, WIDTH])
    total = d.call(aten.sum.dim_IntList, apart, [2])
    return [d.call(aten.view.default, total, [HEADS * POSITIONS, WIDTH]), total, read]


def two_sums(d: Dag, k: Node, v: Node) -> list[Node]:
    """Sums of one tensor have memory of their own: one is scaled in place."""
    read = backward(d, k)
    part = d.call(aten.slice.Tensor, d.gather(d.call(aten.exp.default, repeat(d, k))), 0, 0, 1)
    apart = d.call(aten.view.default, part, [1, HEADS, REPEATS, POSITIONS, WIDTH])
    one, other = (d.call(aten.sum.dim_IntList, apart, [2]) for _ in range(2))
    return [d.call(aten.mul_.Tensor, one, 0.5), other, read]


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
    "a gradient that a view reads": (read_by_a_view, 2),
    "two sums of a gradient": (two_sums, 2),
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


def filled_later(d: Dag, dk: Node) -> list[Node]:
    """What is summed lies in memory that is written behind it."""
    buffer = d.call(aten.exp.default, dk)
    rows = d.call(aten.view.default, buffer, [ALL, POSITIONS * WIDTH])
    d.call(aten.add_.Tensor, buffer, dk)
    whole = d.call(aten.view.default, d.gather(d.call(aten.clone.default, rows)), [RANKS, ALL, POSITIONS, WIDTH])
    return [sum_heads(d, own(d, whole))]


def not_awaited(d: Dag, dk: Node) -> list[Node]:
    """Another reads what is still in flight."""
    sent = d.call(c10d.all_gather_into_tensor.default, dk, RANKS, "g")
    return [sum_heads(d, own(d, wait(d, sent))), sent]


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


def in_flight(d: Dag, k: Node, v: Node) -> list[Node]:
    """A gather is returned without a wait."""
    return [d.call(c10d.all_gather_into_tensor.default, repeat(d, k), RANKS, "g")]


def at_a_symbolic_place(d: Dag, k: Node, v: Node) -> list[Node]:
    """Repeated keys go to a place of a cache that the graph computes; another collective is in the graph."""
    place = d.graph.call_function(aten.sym_size.int, (k, 1))
    place.meta["val"] = 2
    cache = d.call(aten.exp.default, repeat(d, v))
    stored = d.graph.call_function(aten.slice_scatter.default, (cache, repeat(d, k), 2, place))
    stored.meta["val"] = cache.meta["val"]
    return [stored, d.gather(d.call(aten.exp.default, k))]


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
    "in flight": in_flight,
    "at a symbolic place": at_a_symbolic_place,
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
    "not awaited": not_awaited,
}
SUMMED = of_gradients(lambda d, dk: [sum_heads(d, own(d, d.gather(dk)))])
