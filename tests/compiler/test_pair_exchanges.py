"""Exchanges that are independent of each other, brought together: the order, the values, and look-alikes that stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, Interpreter, Node

from tests.compiler.dags import aten, c10d, inputs_of, module_of
from tests.compiler.exchange_dags import LAYER, PAIRED, ROWS, WIDTH, ExchangeDag
from ub_overlap.compiler.cost.policy import Policy
from ub_overlap.compiler.match.collectives import find_collectives
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.passes import prepare_sites
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.select import peak_memory
from ub_overlap.compiler.select.decide import decide
from ub_overlap.compiler.windows.pair_exchanges import NEXT, pair_exchanges
from ub_overlap.runtime import ops

AUTO = Options(profile="h200", min_bytes=0)


def pair(graph: Graph, options: Options = AUTO) -> int:
    """Pair, and check that the graph is legal and has the same nodes."""
    before = list(graph.nodes)
    moved = pair_exchanges(graph, Policy.of(options))
    graph.lint()
    after = list(graph.nodes)
    assert set(after) == set(before) and len(after) == len(before)
    assert moved > 0 or after == before
    return moved


class Exchanged(Interpreter):
    """Runs a graph without ranks: an exchange reverses the rows."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is c10d.all_to_all_single.default:
            return args[0].flip(0)
        return args[0] if target is c10d.wait_tensor.default else super().call_function(target, args, kwargs)


def results(graph: Graph, seed: int = 0) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(Exchanged(module_of(graph)).run(*inputs_of(graph, seed)))


def test_two_halves() -> None:
    """The order of the documentation: each exchange is in flight while the experts of the other half run."""
    d = ExchangeDag()
    graph = d.layers(2)
    truth = results(graph)
    assert d.order() == LAYER
    assert pair(graph) == 2
    assert d.order() == PAIRED
    assert all(map(torch.equal, results(graph), truth))


def test_again() -> None:
    """A graph whose exchanges are paired stays as it is."""
    d = ExchangeDag()
    graph = d.layers(2)
    assert pair(graph) > 0 and pair(graph) == 0
    assert d.order() == PAIRED


def test_what_feeds_the_second_half_moves_with_it() -> None:
    """Its counts are exchanged and read in front of its dispatch, and it starts from the tokens of both halves."""
    d = ExchangeDag()
    x, w = d.tokens(0)
    halves = [d.call(aten.slice.Tensor, x, 0, 8 * i, 8 * i + 8) for i in range(2)]
    sums = []
    for i, half in enumerate(halves):
        counts = d.exchange(f"counts {i}", d.named(f"route {i}", d.cast(half, torch.int64)))
        rows = d.call(aten.mul.Tensor, half, d.named(f"read {i}", d.cast(counts, torch.bfloat16)))
        sums.append(d.layer(i, (rows, w)))
    graph = d.output(*sums)
    truth = results(graph)
    assert pair(graph) == 2
    counts = [["route 0", "counts 0", "read 0"], ["route 1", "counts 1", "read 1"]]
    assert d.order() == [*counts[0], "dispatch 0", *counts[1], *PAIRED[1:]]
    assert all(map(torch.equal, results(graph), truth))


def test_layers_one_behind_the_other() -> None:
    """Both halves of the second layer need both sums of the first: pairs are made within a layer."""
    d = ExchangeDag()
    tokens = [d.tokens(i) for i in range(4)]
    first = [d.layer(i, tokens[i]) for i in range(2)]
    whole = d.named("join", d.call(aten.add.Tensor, *first))
    second = [d.layer(i, (d.call(aten.mul.Tensor, whole, float(i)), tokens[i][1])) for i in (2, 3)]
    graph = d.output(*second)
    truth = results(graph)
    assert pair(graph) == 4
    later = [name.replace("1", "3").replace("0", "2") for name in PAIRED]
    assert d.order() == [*PAIRED, "join", *later]
    assert all(map(torch.equal, results(graph), truth))


def test_halves_hide_each_other() -> None:
    """Each exchange but the last is hidden by a matmul of the other half. In the traced order nothing hides the first half."""
    found: dict[bool, dict[str, Decision]] = {}
    for is_paired in (False, True):
        d = ExchangeDag(8192, 8192)
        tokens = [d.tokens(i) for i in range(2)]
        sums = [d.layer(i, (d.named(f"route {i}", d.mm(x, w)), w)) for i, (x, w) in enumerate(tokens)]
        graph = d.output(*sums)
        if is_paired:
            prepare_sites(graph, AUTO, None)
            experts = d.order().index("experts 0")
            assert d.order()[: experts + 1] == ["route 0", "dispatch 0", "route 1", "dispatch 1", "experts 0"]
        found[is_paired] = decisions(d)
    traced, paired = ({name: decision.paired for name, decision in f.items()} for f in (found[False], found[True]))
    assert traced["dispatch 0"] == traced["combine 0"] == traced["dispatch 1"] == ()
    names = {node.name: name for node, name in d.names.items()}
    hidden = {name: [names[n] for n in nodes] for name, nodes in paired.items()}
    assert hidden == {"dispatch 0": ["route 1"], "dispatch 1": ["experts 0"], "combine 0": ["experts 1"], "combine 1": []}


def decisions(d: ExchangeDag) -> dict[str, Decision]:
    """Return the decision of each exchange, by its name."""
    ops.load()
    exchanges = [d.names[c.node] for c in find_collectives(d.graph)]
    return dict(zip(exchanges, decide(d.graph, AUTO, "forward", lambda *_: None).plan.decisions, strict=True))


# --- look-alikes --------------------------------------------------------------------------------------------------------


def test_an_exchange_that_needs_the_first() -> None:
    """One layer, and a layer behind a layer."""
    for count in (1, 2):
        d = ExchangeDag()
        x, w = d.tokens(0)
        for i in range(count):
            x = d.layer(i, (x, w))
        assert pair(d.output(x)) == 0


def test_a_second_half_that_needs_the_first_sum() -> None:
    d = ExchangeDag()
    first, (x, w) = d.tokens(0), d.tokens(1)
    total = d.layer(0, first)
    assert pair(d.output(d.layer(1, (d.call(aten.add.Tensor, x, total), w)))) == 0


def test_a_second_half_that_needs_the_first_dispatch() -> None:
    """It is independent of the combine alone, behind which it moves."""
    d = ExchangeDag()
    (x, w), (y, v) = d.tokens(0), d.tokens(1)
    sent = d.exchange("dispatch 0", x)
    total = d.named("sum 0", d.relu(d.exchange("combine 0", d.named("experts 0", d.mm(sent, w)))))
    second = d.layer(1, (d.call(aten.add.Tensor, y, sent), v))
    assert pair(d.output(total, second)) == 1
    assert d.order() == ["dispatch 0", "experts 0", "combine 0", "dispatch 1", "sum 0", *LAYER[5:]]


def test_exchanges_in_front_of_the_first_reader() -> None:
    """Ulysses: queries, keys and values are exchanged one behind the other, and then read."""
    d = ExchangeDag()
    tokens = [d.tokens(i) for i in range(3)]
    sent = [d.exchange(f"{i}", d.mm(*t)) for i, t in enumerate(tokens)]
    total = d.call(aten.add.Tensor, d.call(aten.add.Tensor, *sent[:2]), sent[2])
    back = d.exchange("back", d.mm(total, tokens[0][1]))
    assert pair(d.output(d.relu(back))) == 0


def between(change: Callable[[ExchangeDag, Node], Node]) -> ExchangeDag:
    """Return two layers. The second reads `change` of its tokens, which is traced behind the first layer."""
    d = ExchangeDag()
    first, (x, w) = d.tokens(0), d.tokens(1)
    total = d.layer(0, first)
    d.output(total, d.layer(1, (change(d, x), w)))
    return d


def drawn(d: ExchangeDag, x: Node) -> Node:
    return d.call(aten.bernoulli.p, x, 0.5)


def written(d: ExchangeDag, x: Node) -> Node:
    d.call(aten.mul_.Tensor, x, 2.0)
    return x


def write_of_another(d: ExchangeDag, x: Node) -> Node:
    d.call(aten.mul_.Tensor, next(n for n in d.graph.nodes if n.name == "x0"), 2.0)
    return d.relu(x)


def test_writes_and_random_numbers_are_not_passed() -> None:
    """With a pure op in their place the exchange moves: nothing else keeps it."""
    for change in (drawn, written, write_of_another):
        d = between(change)
        assert pair(d.graph) == 0, change.__name__
    assert pair(between(lambda d, x: d.relu(x)).graph) == 2


def test_a_write_behind_both_dispatches() -> None:
    """It keeps the combines, and not the dispatches in front of it."""
    d = ExchangeDag()
    (x, w), (y, v) = d.tokens(0), d.tokens(1)
    sent = [d.exchange("dispatch 0", x)]
    kept = d.named("experts 0", d.mm(sent[0], w))
    sent.append(d.exchange("dispatch 1", y))
    d.call(aten.mul_.Tensor, w, 2.0)
    backs = [d.exchange("combine 0", kept), d.exchange("combine 1", d.mm(sent[1], v))]
    graph = d.output(*map(d.relu, backs))
    truth = results(graph)
    assert pair(graph) == 1
    assert d.order() == ["dispatch 0", "dispatch 1", "experts 0", "combine 0", "combine 1"]
    assert all(map(torch.equal, results(graph), truth))


def test_counts_alone() -> None:
    """Integers are read at once. They are neither moved for themselves nor moved behind."""
    d = ExchangeDag()
    tokens = [d.tokens(i)[0] for i in range(2)]
    read = [d.relu(d.cast(d.exchange(f"{i}", d.cast(x, torch.int64)), torch.bfloat16)) for i, x in enumerate(tokens)]
    assert pair(d.output(*read)) == 0


def test_uneven_constants() -> None:
    """Other ranks may trace other sizes, and another order."""
    d = ExchangeDag()
    tokens = [d.tokens(i) for i in range(2)]
    read = [d.mm(d.exchange(f"{i}", x, (4, 12)), w) for i, (x, w) in enumerate(tokens)]
    assert pair(d.output(*read)) == 0


def test_threshold() -> None:
    """A rank sends half of [16, 8] in bf16: 128 bytes."""
    for least, moved in ((128, 2), (129, 0)):
        assert pair(ExchangeDag().layers(2), replace(AUTO, min_bytes=least)) == moved


@pytest.mark.parametrize(
    "options",
    [
        Options(min_bytes=0),  # tensors of the CPU, without a profile
        replace(AUTO, split="off"),
        replace(AUTO, overlap="off"),
        replace(AUTO, overlap="force"),
    ],
    ids=["cpu", "no_split", "off", "force"],
)
def test_options_that_do_not_weigh(options: Options) -> None:
    assert pair(ExchangeDag().layers(2), options) == 0


@pytest.mark.parametrize("is_limited", [False, True])
def test_peak_memory(monkeypatch: pytest.MonkeyPatch, is_limited: bool) -> None:
    """Each half is small in front and behind: the traced order has the rows of one half alive, and pairs those of two."""
    if is_limited:
        monkeypatch.setattr(peak_memory, "MORE_BYTES", 0)
        monkeypatch.setattr(peak_memory, "MORE_SHARE", 0.0)
    d = ExchangeDag()
    small, wide = [d.input(f"x{i}", ROWS, 1) for i in range(2)], d.input("primals_1", 1, WIDTH)
    square, narrow = d.input("primals_2", WIDTH, WIDTH), d.input("primals_3", WIDTH, 1)
    graph = d.output(*[d.mm(d.layer(i, (d.mm(x, wide), square)), narrow) for i, x in enumerate(small)])
    assert pair(graph) == (0 if is_limited else 2)  # `pair` checks that the order is the traced one


def test_only_the_next_exchanges() -> None:
    """Of the exchanges behind one the first three are looked at: those of a layer. It moves behind the first that finds it."""
    for between, place in ((NEXT - 1, 1), (NEXT, 2)):
        d = ExchangeDag()
        (x, w), other = d.tokens(0), d.tokens(1)
        last = d.exchange("first", x)
        for i in range(between):
            last = d.exchange(f"chain {i}", d.mm(last, w))
        independent = d.exchange("other", other[0])
        assert pair(d.output(d.relu(last), d.relu(independent))) == 1
        assert d.order().index("other") == place


# --- random graphs ------------------------------------------------------------------------------------------------------


def random_exchanges(seed: int) -> ExchangeDag:
    """Return a graph with a mix of exchanges, matmuls, sums, counts, and a few writes and random numbers."""
    draw = random.Random(seed)
    d = ExchangeDag()
    values = [d.tokens(i)[0] for i in range(3)]
    weights = [d.input(f"v{i}", WIDTH, WIDTH) for i in range(2)]
    kinds = ["exchange"] * 5 + ["mm"] * 4 + ["add"] * 2 + ["counts"]
    for i in range(20):
        x, kind = draw.choice(values[-4:]), "write" if draw.random() < 0.05 else draw.choice(kinds)
        if kind == "exchange":
            values.append(d.exchange(f"{i}", x))
        elif kind == "mm":
            values.append(d.call(aten.clamp.default, d.mm(x, draw.choice(weights)), -1, 1))
        elif kind == "add":
            values.append(d.call(aten.add.Tensor, x, draw.choice(values)))
        elif kind == "counts":
            values.append(d.cast(d.exchange(f"{i}", d.cast(x, torch.int64)), torch.bfloat16))
        else:
            d.call(aten.mul_.Tensor, draw.choice(weights), -1.0)
    d.output(*values)
    return d


@pytest.mark.tier("full")
def test_random_graphs() -> None:
    """Values stay, whatever moves; nothing moves over a write; two ranks with the same graph have the same order."""
    moved = 0
    for seed in range(80):
        d = random_exchanges(seed)
        truth = results(d.graph, seed)
        moved += pair(d.graph) > 0
        assert all(map(torch.equal, results(d.graph, seed), truth)), seed
        again = random_exchanges(seed)
        pair(again.graph)
        assert [n.name for n in again.graph.nodes] == [n.name for n in d.graph.nodes], seed
    assert moved > 20


def test_steps_of_rings_stay() -> None:
    """A rank that does not attend between two steps has steps that are independent of each other. Other ranks have not."""
    d = ExchangeDag()
    rows = [d.tokens(i)[0] for i in range(2)]
    received = [d.named(f"reader {i}", d.relu(d.exchange(f"step {i}", x, [0, ROWS]))) for i, x in enumerate(rows)]
    assert pair(d.output(*received)) == 0
    assert d.order() == ["step 0", "reader 0", "step 1", "reader 1"]
