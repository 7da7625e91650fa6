"""Numbers that the host reads for both halves of a layer: in front of both dispatches, if only routers compute them."""

from __future__ import annotations

import operator

import pytest

from tests.compiler.dags import aten, c10d
from tests.compiler.exchange_dags import PAIRED, ReadDag
from tests.compiler.test_pair_exchanges import pair

READ_FIRST = ["route 0", "counts 0", "route 1", "counts 1", "read 1", "read 0", "dispatch 0", *PAIRED[1:]]
READ_LATER = ["route 0", "counts 0", "read 0", "dispatch 0", "route 1", "counts 1", "read 1", *PAIRED[1:]]


@pytest.mark.parametrize(
    ("variant", "order"),
    [
        ("router", READ_FIRST),
        ("no matmul", READ_FIRST),
        ("wide", READ_LATER),
        ("sum over ranks", READ_LATER),
        ("rows", READ_LATER),
    ],
)
def test_numbers_of_both_halves_are_read_together(variant: str, order: list[str]) -> None:
    """What a router computes, and counts, move in front of the first read. Look-alikes: a wide matmul, which takes long; a
    collective of rows; wide rows that are summed up."""
    d = ReadDag(2048 if variant in ("wide", "rows") else 64)
    x, w = d.tokens(0)
    router = {"no matmul": None, "wide": w}.get(variant, d.input("router", d.width, 4))
    sums = []
    for i in range(2):
        source = d.relu(x)
        if i and variant == "sum over ranks":
            source = d.call(c10d.wait_tensor.default, d.call(c10d.all_reduce.default, source, "sum", d.group))
        if i and variant == "rows":
            source = d.call(aten.cumsum.default, source, 0)
        sums.append(d.layer(i, (x, w), [d.number(i, d.counts(i, source, router))] * 2))
    graph = d.output(*sums)
    assert pair(graph) == 2
    assert d.order() == order


@pytest.mark.parametrize("what", ["write", "random", "its numbers"])
def test_reads_that_stay(what: str) -> None:
    """The second router reads what is written in between, draws random numbers, or needs the first numbers."""
    d = ReadDag()
    x, w = d.tokens(0)
    router, state = d.input("router", d.width, 4), d.input("state", d.rows, d.width)
    first = d.number(0, d.counts(0, d.relu(x), router))
    source = d.relu(state)
    if what == "write":
        d.call(aten.copy_.default, state, x)
    elif what == "random":
        source = d.call(aten.native_dropout.default, source, 0.5, True)
        dropped = d.graph.call_function(operator.getitem, (source, 0))
        dropped.meta["val"] = source.meta["val"][0]
        source = dropped
    else:
        scaled = d.graph.call_function(aten.mul.Tensor, (source, first))
        scaled.meta["val"] = source.meta["val"]
        source = scaled
    second = d.counts(1, source, router)
    sums = [d.layer(0, (x, w), [first] * 2), d.layer(1, (x, w), [d.number(1, second)] * 2)]
    graph = d.output(*sums)
    before = d.order()
    pair(graph)
    assert d.order()[:3] == before[:3] == ["route 0", "counts 0", "read 0"]
