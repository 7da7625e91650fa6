"""Windows of collectives: bounds, mutations, which ones are split, the clock, and random graphs."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from tests.compiler.dags import Dag, aten, c10d, inputs_of, module_of, random_dag
from tests.compiler.rank_compile import world_name
from tests.compiler.test_all_to_all import MoEDag
from tests.harness.ranks import RankPool
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.joint.joint_decision import record_decision
from ub_overlap.compiler.match.collectives import Collective, Op, find_collectives
from ub_overlap.compiler.match.fusion_order import FusionOrder
from ub_overlap.compiler.match.window import WindowFinder
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.select.decide import decide
from ub_overlap.compiler.windows.node_times import NodeTimes
from ub_overlap.runtime import ops

AUTO = Options(profile="h200", min_bytes=0)
prims = torch.ops.prims


def bounds(d: Dag, *outputs: Node) -> list[tuple[str, str]]:
    """Return for each collective the nodes in front of which its start and its finish may stand at the ends of its window."""
    graph = d.output(*outputs)
    order, finder = FusionOrder(graph), WindowFinder(graph)
    spans = [finder.find(c).bounds(order, {}) for c in find_collectives(graph)]
    return [(order.items[first].name, order.items[last].name) for first, last in spans]


def test_a_gather_of_a_parameter_starts_anywhere() -> None:
    """It moves with its cast in front of everything; its finish stays in front of the first matmul."""
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("primals_1", 32, 64)
    busy = d.call(aten.relu.default, x)
    gathered = d.gather(d.call(prims.convert_element_type.default, w, torch.float16))
    product = d.mm(d.call(prims.convert_element_type.default, busy, torch.float16), d.t(gathered))
    assert bounds(d, product) == [("relu_default", "mm_default")]


def test_a_reduction_for_the_output_finishes_last() -> None:
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("w", 64, 64)
    gradient = d.mm(x, w)
    reduced = d.call(aten.mul.Tensor, d.scatter(gradient), 0.5)
    assert bounds(d, reduced, d.mm(w, x)) == [("reduce_scatter_tensor_default", "output")]


def test_a_reduction_that_is_copied_for_the_output() -> None:
    """DDP's python reducer copies the reduced gradient over the local one."""
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("w", 64, 64)
    gradient = d.mm(x, w)
    summed = d.call(c10d.all_reduce.default, d.call(aten.div.Tensor, gradient, 2), "sum", "0")
    copied = d.call(aten.copy.default, gradient, d.call(c10d.wait_tensor.default, summed))
    graph = d.output(copied, d.mm(w, x))
    window = WindowFinder(graph).find(replace(the_all_reduce(graph), wait=next(iter(summed.users))))
    assert window.trail == (copied,) and [n.op for n in window.readers] == ["output"]


@pytest.mark.parametrize("computes", [False, True])
def test_a_result_that_is_repeated(computes: bool) -> None:
    """Each head of keys and values is repeated for several query heads: the finish stays in front of what reads the repeated.

    Look-alike: a sum of the heads, which is computed where it stands.
    """
    d = Dag()
    x, keys = d.input("x", 64, 64), d.input("keys", 32, 64)
    gathered = d.gather(d.call(aten.relu.default, keys))
    busy = d.mm(x, x)
    heads = d.call(aten.expand.default, d.call(aten.view.default, gathered, [64, 1, 64]), [64, 2, 64])
    if computes:
        read = d.call(aten.sum.dim_IntList, heads, [1])
        more = d.mm(x, read)
    else:
        read = d.call(aten.clone.default, heads)
        more = d.call(aten.bmm.default, d.call(aten.reshape.default, read, [2, 64, 64]), d.input("other", 2, 64, 64))
    last = read if computes else more
    assert bounds(d, busy, more) == [("all_gather_into_tensor_default", last.name)]


@pytest.mark.parametrize("repeats", [False, True])
def test_a_part_of_what_is_repeated_is_no_shard(repeats: bool) -> None:
    """A causal rank attends to a half of the repeated keys. Look-alike: a rank of a ring reads one of the two shards."""
    d = Dag()
    keys = d.input("keys", 32, 64)
    read = d.gather(d.call(aten.relu.default, keys))
    if repeats:
        heads = d.call(aten.expand.default, d.call(aten.view.default, read, [64, 1, 64]), [64, 2, 64])
        read = d.call(aten.view.default, d.call(aten.clone.default, heads), [128, 64])
    graph = d.output(d.call(aten.relu.default, d.call(aten.slice.Tensor, read, 0, 0, 64 if repeats else 32)))
    window = WindowFinder(graph).find(find_collectives(graph)[0])
    assert window.may_differ_by_rank is not repeats


def test_a_result_that_is_written() -> None:
    """Look-alike of a view: an op in place returns its input, and does not move."""
    d = Dag()
    x, keys = d.input("x", 64, 64), d.input("keys", 32, 64)
    gathered = d.gather(d.call(aten.relu.default, keys))
    written = d.call(aten.mul_.Tensor, gathered, 2.0)
    assert bounds(d, d.mm(x, x), d.mm(x, written)) == [("all_gather_into_tensor_default", written.name)]


@pytest.mark.parametrize("write", [False, True])
def test_a_reduction_that_is_added_to_a_gradient(write: bool) -> None:
    """Compiled autograd adds the microbatches' gradients in the graph. Look-alike: the first gradient is written later."""
    d = Dag()
    x, w, grad = d.input("x", 64, 64), d.input("w", 64, 64), d.input("grad", 32, 64)
    reduced = d.scatter(d.mm(x, w))
    total = d.call(aten.add.Tensor, grad, d.call(aten.mul.Tensor, reduced, 0.5))
    more = d.mm(w, x)
    last = d.call(aten.mul_.Tensor, grad, 2.0).name if write else "output"
    assert bounds(d, total, more) == [("reduce_scatter_tensor_default", last)]


def test_a_reduction_that_is_copied_to_a_new_gradient() -> None:
    """The first microbatch's is copied by compiled autograd, to a tensor with the sizes of the result."""
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("w", 64, 64)
    reduced = d.scatter(d.mm(x, w))
    new = d.call(aten.new_empty_strided.default, reduced, [32, 64], [64, 1])
    copied = d.call(aten.copy.default, new, reduced)
    assert bounds(d, copied, d.mm(w, x)) == [("reduce_scatter_tensor_default", "output")]


@pytest.mark.parametrize("other", ["computed", "row"])
def test_other_sums_are_read(other: str) -> None:
    """Look-alikes: a sum with what the graph computes, and with a row that is added to each row of the result."""
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("w", 64, 64)
    reduced = d.scatter(d.mm(x, w))
    operand = d.input("b", 64) if other == "row" else d.scatter(d.mm(w, x))
    more = d.mm(w, w)
    total = d.call(aten.add.Tensor, operand, reduced)
    assert bounds(d, total, more)[0] == ("reduce_scatter_tensor_default", total.name)


def the_all_reduce(graph: Graph) -> Collective:
    """Return the all_reduce of a graph whose group does not exist."""
    (node,) = (n for n in graph.nodes if n.target is c10d.all_reduce.default)
    return Collective(Op.ALL_REDUCE, node, None, node.all_input_nodes[0], "0", 2, "sum")


def test_a_reduction_that_is_read_finishes_before() -> None:
    """Look-alike: the result is read by a matmul of the graph."""
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("w", 64, 64)
    reduced = d.scatter(d.mm(x, w))
    more = d.mm(w, x)
    read = d.mm(reduced, w)
    late = d.mm(x, x)
    assert bounds(d, reduced, more, read, late) == [("reduce_scatter_tensor_default", read.name)]


@pytest.mark.parametrize("before", [True, False])
def test_writes_bound_the_window(before: bool) -> None:
    """Look-alike: the shard is written before the gather, or between gather and reader; through a view, too."""
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("primals_1", 32, 64)
    busy = d.call(aten.relu.default, x)

    def write() -> Node:
        return d.call(aten.add_.Tensor, d.call(aten.view.default, w, [64, 32]), 1.0)

    written = write() if before else None
    gathered = d.gather(w)
    written = written or write()
    product = d.mm(busy, d.t(gathered))
    assert bounds(d, product) == [
        ("all_gather_into_tensor_default", product.name) if before else ("relu_default", written.name)
    ]


def test_what_a_collective_feeds_does_not_move_in_front_of_it() -> None:
    """A reduction of a reduction, as in hybrid sharding: the second starts where the first has finished."""
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("w", 64, 64)
    first = d.scatter(d.call(aten.cat.default, [d.mm(x, w), d.mm(w, x)]))
    second = d.scatter(d.call(aten.view.default, first, [64, 64]))
    graph = d.output(second, d.mm(w, x))
    order, finder = FusionOrder(graph), WindowFinder(graph)
    windows = [finder.find(c) for c in find_collectives(graph)]
    moving = {n: w for w in windows for n in (w.collective.wait, *w.trail) if n is not None}
    (_, last), (begin, _) = (w.bounds(order, moving) for w in windows)
    assert last == begin == order.position[windows[1].collective.node]


# --- decisions ----------------------------------------------------------------------------------------------------------


def layers(count: int = 3, name: str = "primals_{}") -> Dag:
    """Return `count` products with gathered weights, one after the other: up and down projections of an 8B layer.

    The graph returns the gathered weights, as a forward does that saves them.
    """
    d = Dag(2)
    x = d.input("x", 4096, 4096)
    shards = [d.input(name.format(i + 1), *((2048, 14336) if i % 2 else (7168, 4096))) for i in range(count)]
    gathered = [d.gather(shard) for shard in shards]
    for weight in gathered:
        x = d.mm(x, d.t(weight))
    d.output(x, *gathered)
    return d


def plan(d: Dag, options: Options = AUTO, phase: str = "forward") -> Plan:
    return decide(d.graph, options, phase, lambda *_: None).plan


def test_auto_prefetches_parameters() -> None:
    """All but the first gather are split, and the first, which nothing hides, keeps its matmul."""
    decisions = plan(layers()).decisions
    assert [str(d.strategy).partition(":")[0] for d in decisions] == ["pipelined", "split", "split"]
    assert decisions[1].window is not None and "us exposed" in decisions[1].detail
    assert dict(decisions[1].predicted)["split"] < dict(decisions[1].predicted)["none"]
    again = Plan.from_json(plan(layers()).to_json())
    assert again.digest == plan(layers()).digest and again.decisions == decisions


def test_auto_leaves_other_gathers_to_their_matmuls() -> None:
    """Look-alikes: activations, the option "off", and overlap="force", which asks for fused sites."""
    for found in (
        plan(layers(name="saved_{}")),
        plan(layers(), Options(profile="h200", min_bytes=0, split="off")),
        plan(layers(), Options(profile="h200", min_bytes=0, overlap="force")),
        plan(layers(), Options(profile="h200", min_bytes=0, split_bytes=0)),
    ):
        assert not any("split" in str(d.strategy) for d in found.decisions)


def test_the_plan_has_the_order_of_communication() -> None:
    """Ranks compare slots and the order of starts; plans without split sites have nothing of them."""
    found = plan(layers(), replace(AUTO, coalesce="off"))
    windows = [site.get("window") for site in found.shared["sites"]]
    assert windows[0] is None and all(w is not None and w[0] in range(8) for w in windows[1:])
    assert [w[1] for w in windows[1:]] == [0, 2]  # the pipelined first gather is number 1
    later = replace(found.decisions[2], window=replace(found.decisions[2].window, order=0))  # type: ignore[type-var]
    assert replace(found, decisions=(*found.decisions[:2], later)).digest != found.digest
    off = plan(layers(), Options(profile="h200", min_bytes=0, split="off"))
    assert not any("window" in site for site in off.shared["sites"])


def test_sixteen_layers_are_decided_soon() -> None:
    """The gathers and the reductions of 16 layers of 7 weights, in seconds of this process."""
    forward, d = layers(16 * 7), Dag(2)
    gradient, x = d.input("gradient", 4096, 4096), d.input("x", 4096, 4096)
    reduced = []
    for _ in range(16 * 7):
        reduced.append(d.scatter(d.mm(d.t(gradient), x)))
        gradient = d.mm(gradient, x)
    d.output(gradient, *reduced)
    begun = time.process_time()
    plans = plan(forward), plan(d, phase="backward")
    seconds = time.process_time() - begun
    assert all(sum("split" in str(one.strategy) for one in found.decisions) > 100 for found in plans)
    assert seconds < 10.0, "0.4 s on an idle machine"


# --- several collectives, one product -----------------------------------------------------------------------------------


def exchange_and_gather(rows: int, columns: int = 0) -> Graph:
    """Return an exchange of four ranks with a product in its window, and a gather of two ranks that reads what it brings.

    The product can hide either. The attention behind the gather hides it as well, if there is memory for both of them.
    `rows`: of the gathered shard. `columns`: of the result of one more product behind the gather, 0 for none.
    """
    d = MoEDag()
    x, w, shard = d.input("primals_1", 8192, 4096), d.input("primals_2", 4096, 2048), d.input("shard", rows, 4096)
    other = [d.input("primals_3", 4096, columns)] if columns else []
    back = d.exchange(d.relu(x), [2048] * 4, [2048] * 4)
    product = d.mm(x, w)
    received = d.relu(back)
    d.group = "other"
    gathered = d.gather(d.call(aten.add.Tensor, shard, d.call(aten.slice.Tensor, received, 0, 0, rows)))
    heads = d.call(aten.view.default, received, [1, 32, -1, 128])
    attention = d.call(aten._scaled_dot_product_flash_attention.default, heads, heads, heads)
    more = [d.mm(received, weight) for weight in other]
    return d.output(product, attention, *more, d.relu(gathered))


def decide_exchange_and_gather(rows: int, columns: int = 0, **options: Any) -> tuple[Decision, Decision]:
    """Return the decisions with memory for the exchange alone: its landing memory and its input."""
    limited = replace(AUTO, split_bytes=128 << 20, **options)
    exchange, gather = decide(exchange_and_gather(rows, columns), limited, "forward", lambda *_: None).plan.decisions
    return exchange, gather


def saved_us(decision: Decision) -> float:
    predicted = dict(decision.predicted)
    return predicted["none"] - predicted[str(decision.strategy)]


@pytest.mark.parametrize(("rows", "is_split"), [(3072, True), (6144, False)])
def test_a_product_hides_what_saves_more(rows: int, is_split: bool) -> None:
    """The gather that finds no memory takes the product from the exchange only where it saves more with it."""
    _, bulk = decide_exchange_and_gather(rows, split="off")
    assert str(bulk.strategy) == "bulk" and bulk.paired == ("mm_default",)
    exchange, gather = decide_exchange_and_gather(rows)
    assert (str(exchange.strategy), str(gather.strategy)) == (("split", "none") if is_split else ("none", "bulk"))
    if is_split:
        assert exchange.paired == ("mm_default",) and saved_us(exchange) > saved_us(bulk)


def test_a_gather_takes_a_product_that_hides_nothing_else() -> None:
    """The gather alone would save more with the product of the exchange, but both save most with a product each."""
    _, bulk = decide_exchange_and_gather(3072, 512, split="off")
    assert str(bulk.strategy) == "bulk" and bulk.paired == ("mm_default",)
    exchange, gather = decide_exchange_and_gather(3072, 512)
    assert (str(exchange.strategy), str(gather.strategy)) == ("split", "bulk")
    assert (exchange.paired, gather.paired) == (("mm_default",), ("mm_default_1",))
    assert saved_us(gather) < saved_us(bulk) < saved_us(exchange) + saved_us(gather)


# --- the clock ----------------------------------------------------------------------------------------------------------


def test_times_of_nodes() -> None:
    """Matmuls, attention and memory-bound work have times; views, fused nodes and collectives have none."""
    d = Dag(2)
    x, w, shard = d.input("x", 4096, 4096), d.input("w", 4096, 4096), d.input("primals_1", 2048, 4096)
    product = d.mm(x, w)
    inner = d.call(aten.mul.Tensor, product, 2.0)
    scaled = d.call(aten.add.Tensor, inner, product)
    batched = d.call(
        aten.bmm.default, *(d.call(aten.view.default, t, [4, 1024, 4096]) for t in (x,)), d.input("b", 4, 4096, 64)
    )
    gathered = d.gather(shard)
    total = d.mm(scaled, gathered)
    heads = [d.call(aten.view.default, t, [1, 32, 4096, 128]) for t in (x, w, product)]
    attention = d.call(aten._scaled_dot_product_flash_attention.default, *heads)
    d.output(total, batched, attention)
    times = NodeTimes.of(d.graph, load("h200"), {})
    assert times.us(product) == pytest.approx(2 * 4096**3 / 700e6, rel=0.2)
    assert times.us(attention) == pytest.approx(4 * 32 * 4096**2 * 128 / (708e6 * 0.55), rel=0.05)
    moved = 4 * 2 * (1024 * 4096 + 4096 * 64 + 1024 * 64)
    assert times.us(batched) == pytest.approx(moved / 3.8e6, rel=0.3)  # narrow products wait for memory
    assert times.us(scaled) == pytest.approx(2 * 2**25 / 3.8e6, rel=0.2)  # reads the product once, writes the sum
    assert [times.us(n) for n in (x, inner, heads[0], gathered, gathered.args[0])] == [0.0] * 5  # type: ignore[arg-type]


# --- random graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.tier("full")
def test_random_graphs_compute_the_same(pool2: RankPool) -> None:
    """Matmuls, gathers, scatters, sums and writes in random order: with every collective split, and with half of them."""
    for wrong, strategies in pool2.run(run_random, list(range(30))):
        assert not wrong, wrong
        assert strategies["split"] > 60 and strategies["pipelined"] + strategies["bulk"] > 10, strategies


def run_random(rank: int, world: int, seeds: list[int]) -> tuple[list[str], Counter[str]]:
    """Return the graphs whose results differ from the plain ones, and the number of sites by strategy."""
    ops.load()
    wrong: list[str] = []
    strategies: Counter[str] = Counter()
    half = [{"strategy": "split", "kind": "*reduce_scatter", "optional": True}]
    for seed in seeds:
        for overrides in ([{"strategy": "split", "optional": True}], half):
            graph = random_dag(seed, world, world_name(), 14, torch.float32)
            plain = module_of(random_dag(seed, world, world_name(), 14, torch.float32))
            options = parse({"overlap": "force", "overrides": overrides}, frozenset())[0]
            decided = decide(graph, options, "backward", lambda *_: None)
            rewrite(graph, decided.chosen, Outputs(is_backward=True), False, decided.layout)
            results, truth = (m(*inputs_of(plain.graph, rank)) for m in (module_of(graph), plain))
            strategies.update(d.strategy.mode.value for d in decided.plan.decisions)
            if not all(
                torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max())) for a, b in zip(results, truth, strict=True)
            ):
                wrong.append(f"seed {seed}, {overrides}")
    return wrong, strategies


@pytest.mark.parametrize("of", ["parameter", "activation"])
def test_a_float8_gather_of_a_parameter(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cast moves with it, behind the amax over ranks. That of an activation, whose scale is not one over ranks, stays."""
    monkeypatch.setattr(compat, "group_size", lambda name: 2)  # the graph is not run
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("primals_1", 32, 64)
    amax = d.call(c10d.wait_tensor.default, d.call(c10d.all_reduce.default, d.call(aten.amax.default, w, []), "max", "0"))
    record_decision(amax.all_input_nodes[0], carries_scales=of == "parameter")
    busy = d.call(aten.relu.default, x)
    scaled = d.call(aten.mul.Tensor, w, d.call(aten.reciprocal.default, amax))
    finite = d.call(aten.lt.Scalar, d.call(aten.abs.default, w), 1e30)
    q = d.call(prims.convert_element_type.default, d.call(aten.where.ScalarOther, finite, scaled, 0.0), torch.float8_e4m3fn)
    gathered = d.call(aten.view.dtype, d.gather(d.call(aten.view.dtype, q, torch.uint8)), torch.float8_e4m3fn)
    product = d.mm(busy, d.t(d.call(prims.convert_element_type.default, gathered, torch.float32)))
    first, last = bounds(d, product)[-1]
    assert last == product.name and (first == busy.name) == (of == "parameter"), (first, last)
    window = WindowFinder(product.graph).find(find_collectives(product.graph)[-1])
    assert window.is_at_the_edge(None) == (of == "parameter")
