"""Pipelined sites with independent matmuls: which are chosen, and that results stay the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph

from tests.compiler.dags import Dag, aten, c10d
from tests.compiler.rank_compile import decisions_of, world_name
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from tests.models.compare import Comparison, compare, uncached
from ub_overlap.compiler.cost import SiteShape, load
from ub_overlap.compiler.cost import choose as chosen
from ub_overlap.compiler.cost.policy import Policy
from ub_overlap.compiler.graph.aten import shape_of
from ub_overlap.compiler.graph.emitter import Emitter
from ub_overlap.compiler.graph.matmul import Operand
from ub_overlap.compiler.match import Candidate, Reduction, find_candidates
from ub_overlap.compiler.match.fusion_order import FusionOrder
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.overrides.requested_strategy import Override
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.rewrite.packed_operands import PackedOperands
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.select.alternatives import Alternative, AlternativeFinder
from ub_overlap.compiler.select.assignment import assign_alternatives
from ub_overlap.compiler.select.decide import decide
from ub_overlap.compiler.select.peak_memory import PeakMemory, total_bytes
from ub_overlap.compiler.select.profitability import SiteCosts
from ub_overlap.runtime import ops
from ub_overlap.runtime.errors import OptionError

AUTO = Options(profile="h200", split="off")


def gradients_of_o(ranks: int, width: int = 512, rows: int = 1792) -> Graph:
    """Return a gather with one consumer of `width` columns, and two independent matmuls: gradients of weights."""
    d = Dag(ranks)
    gathered = d.gather(d.input("x", 8192 // ranks, 4096))
    independent = [d.mm(d.input(f"a{i}", rows, 8192), d.input(f"b{i}", 8192, 4096)) for i in range(2)]
    return d.output(d.mm(gathered, d.input("w", 4096, width)), *independent)


def only(graph: Graph, options: Options = AUTO) -> Decision:
    (decision,) = decide(graph, options, "backward", lambda *_: None).plan.decisions
    return decision


def test_exposed_gather_takes_an_independent_matmul() -> None:
    """8B over 8 ranks: the gather for the gradients of wo binds the link. Its own matmul hides a fraction of it."""
    graph = gradients_of_o(8)
    plan = decide(graph, AUTO, "backward", lambda *_: None).plan
    (site,) = plan.decisions
    assert site.strategy.mode is Mode.PIPELINED and len(site.paired) == 1 and len(site.matmuls) == 2
    assert site.work is not None and site.work.independent == 1
    assert f"concurrent with {site.paired[0]}" in site.detail
    assert dict(site.shapes)["matmul1"] == "[1792, 8192] @ [8192, 4096]"
    assert Plan.from_json(plan.to_json()) == plan and Plan.from_json(plan.to_json()).digest == plan.digest


@pytest.mark.parametrize("width", [64, 512, 2048])
def test_sets_that_cannot_gain_are_left_out(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of matmuls are not predicted where fewer hide everything, and the plan is that of all sets."""
    plans, counts = [], []
    for most in (None, math.inf):
        shapes: list[SiteShape] = []

        def choose(shape: SiteShape, *args: Any, most: float | None = most, shapes: list[SiteShape] = shapes) -> Any:
            shapes.append(shape)
            found = chosen(shape, *args)
            return found if most is None else replace(found, most_us=most)

        with monkeypatch.context() as patch:
            patch.setattr("ub_overlap.compiler.select.profitability.choose", choose)
            graph = gradients(width)
            plans.append(decide(graph, AUTO, "backward", lambda *_: None).plan)
        counts.append(len(shapes))
    assert plans[0].decisions == plans[1].decisions
    assert counts[0] < 0.7 * counts[1], counts


def gradients(width: int) -> Graph:
    """Return two gathers with consumers of `width` columns, a reduction, and independent matmuls of several sizes."""
    d = Dag(8)
    x = [d.input(f"x{i}", 8192 // 8, 4096) for i in range(2)]
    more = [d.mm(d.input(f"a{i}", rows, 8192), d.input(f"b{i}", 8192, 4096)) for i, rows in enumerate((1792, 4096, 256, 768))]
    products = [d.mm(d.gather(shard), d.input(f"w{i}", 4096, width)) for i, shard in enumerate(x)]
    return d.output(*products, *more, d.scatter(d.mm(d.input("g", 4096, 8192), d.input("h", 8192, 4096))))


def test_hidden_gather_takes_none() -> None:
    """A wide consumer hides the communication by itself."""
    site = only(gradients_of_o(2, width=8192))
    assert site.strategy.mode is Mode.PIPELINED and site.paired == () and site.work is not None
    assert site.work.independent == 0


def beside_a_gather(how: str) -> Graph:
    """Return a gather, and a matmul that is independent of it, or makes the consumer's weight."""
    d = Dag(8)
    gathered = d.gather(d.input("x", 1024, 4096))
    other, w = d.mm(d.input("a", 512, 8192), d.input("b", 8192, 4096)), d.input("w", 512, 4096)
    weight = {"independent": w, "operand": other, "through relu": d.call(aten.relu.default, other)}[how]
    return d.output(d.mm(gathered, d.t(weight)), other)


def beside_a_scatter(how: str) -> Graph:
    """Return a scatter, and a matmul that is independent of it, or reads its product."""
    d = Dag(8)
    product = d.mm(d.input("a", 8192, 512), d.input("b", 512, 4096))
    scattered, x = d.scatter(product), d.input("x", 8192, 4096)
    right = {"independent": x, "operand": product, "through relu": d.call(aten.relu.default, product)}[how]
    return d.output(scattered, d.mm(d.input("c", 1792, 8192), right))


def beside_its_operand(how: str) -> Graph:
    """Return a scatter, and a matmul that is independent of it, or makes the left operand of its product."""
    d = Dag(8)
    other, x = d.mm(d.input("e", 8192, 4096), d.input("f", 4096, 512)), d.input("x", 8192, 512)
    left = {"independent": x, "operand": other, "through relu": d.call(aten.relu.default, other)}[how]
    return d.output(d.scatter(d.mm(left, d.input("b", 512, 4096))), other)


@pytest.mark.parametrize("graph", [beside_a_gather, beside_a_scatter, beside_its_operand])
def test_only_matmuls_without_a_dependency_are_taken(graph: Callable[[str], Graph]) -> None:
    taken = [a.site.independent for a in placed(graph("independent")) if not a.is_bulk]
    assert len(taken) == 1 and len(taken[0]) == 1, "so only the dependency prevents it below"
    for how in ("operand", "through relu"):
        assert not any(a.site.independent for a in placed(graph(how)) if not a.is_bulk), how


def test_a_matmul_on_another_device_is_not_taken() -> None:
    """A matmul on the CPU next to a collective on the GPU, or the reverse."""
    d = Dag(8)
    gathered, a, b = d.gather(d.input("x", 1024, 4096)), d.input("a", 1792, 8192), d.input("b", 8192, 4096)
    for n in (a, b):
        with d.mode:
            n.meta["val"] = torch.empty(n.meta["val"].shape, dtype=d.dtype, device="cuda")
    site = only(d.output(d.mm(gathered, d.input("w", 4096, 512)), gathered, d.mm(a, b)))
    assert site.overlapped and site.paired == () and site.options == ("pipelined", "split", "one_shot")


@pytest.mark.parametrize(
    "options", [{}, {"overlap": "force"}, {"overrides": {"*": "bulk"}}, {"overrides": {"*": "split"}}], ids=str
)
@pytest.mark.parametrize("reduce_op", ["sum", "max"])
def test_a_maximum_takes_no_independent_matmul(reduce_op: str, options: dict[str, Any]) -> None:
    """The ops send sums only. A sum of the same sizes is overlapped."""
    d = Dag(8)
    x, a, b = d.input("x", 8192, 4096), d.input("a", 8192, 8192), d.input("b", 8192, 8192)
    scattered = d.call(c10d.reduce_scatter_tensor.default, x, reduce_op, d.ranks, d.group)
    product = d.mm(a, b)
    graph = d.output(d.call(c10d.wait_tensor.default, scattered), product, d.mm(a, product))
    decision = only(graph, parse({"profile": "h200", **options}, {})[0])
    if reduce_op == "sum":
        assert decision.overlapped and {"bulk", "split"} <= {*decision.options}
    else:
        assert decision.reason is Reason.REDUCE_OP_UNSUPPORTED and not decision.options


def test_the_independent_matmul_of_another_site() -> None:
    """Two gathers save nothing with their own matmuls alone, and one matmul is independent of both."""
    d = Dag(8)
    products = [d.mm(d.gather(d.input(f"x{i}", 512, 4096)), d.input(f"w{i}", 4096, 16)) for i in range(2)]
    graph = d.output(*products, d.mm(d.input("a", 1792, 8192), d.input("b", 8192, 4096)))
    decisions = decide(graph, AUTO, "backward", lambda *_: None).plan.decisions
    (without,) = (d for d in decisions if not d.overlapped)
    assert len(decisions) == 2 and without.reason is Reason.MATMUL_TAKEN
    assert without.detail.startswith("every independent matmul already hides another collective")


def placed(graph: Graph) -> list[Alternative]:
    """Return the selected alternatives. Memory has no price, so that only dependencies refuse a site."""
    order, costs = FusionOrder(graph), SiteCosts.of(graph, Policy.of(AUTO))
    finder = AlternativeFinder(costs, order, lambda _: None)
    found = [finder.find(candidate, None) for candidate in find_candidates(graph)]
    for alternatives in found:
        alternatives.counts_memory = False
    return [a.alternative for a in assign_alternatives(found, order, PeakMemory.uncounted()) if a.alternative]


def test_equal_sizes_share_no_more_than_they_may() -> None:
    """Sets are found once for equal sizes. A fresh search of each collective finds the same: also where matmuls read each
    other, are of other sizes, or where another strategy is requested."""
    d = Dag(8)
    scale = d.input("scale")
    for i, (reads, width) in enumerate(((False, 4096), (True, 4096), (False, 4096), (True, 4096), (False, 2048))):

        def of_this_layer(name: str, *size: int, layer: int = i, scale: Any = scale) -> Any:
            return d.call(aten.mul.Tensor, d.input(f"{name}{layer}", *size), scale)

        first = d.mm(of_this_layer("a", 1792, 4096), d.input(f"b{i}", 4096, 4096))
        second = d.mm(first if reads else of_this_layer("c", 1792, 4096), d.input(f"d{i}", 4096, width))
        own = d.mm(d.gather(of_this_layer("x", 512, 4096)), d.input(f"w{i}", 4096, 16))
        sums = [d.call(aten.sum.default, y) for y in (first, second, own)]  # the next layer reads them all
        scale = d.call(aten.add.Tensor, d.call(aten.add.Tensor, *sums[:2]), sums[2])
    graph = d.output(scale)
    costs, candidates = SiteCosts.of(graph, Policy.of(AUTO)), find_candidates(graph)

    def found(finder: AlternativeFinder, c: Candidate, override: Override | None) -> list[tuple[object, ...]]:
        ranked = finder.find(c, override).ranked
        return [(str(a.strategy), [m.node.name for m in a.site.matmuls], a.saved_us) for a in ranked]

    def finder() -> AlternativeFinder:
        return AlternativeFinder(costs, FusionOrder(graph), lambda _: None)

    shared = finder()
    for override in (
        None,
        Override(Strategy(Mode.BULK), "a test"),
        Override(Strategy(Mode.PIPELINED), "a test", independent=1),
        None,
    ):
        for c in candidates:
            assert found(shared, c, override) == found(finder(), c, override)
    sets = shared._sets  # of three kinds of layers, chosen and requested
    assert len(sets._bulk_sets) == len(sets._pipelined_sets) == 2 * 3


def test_the_option() -> None:
    """ "bulk": pipelined sites take none; "off": no site does."""
    auto, bulk, off = (only(gradients_of_o(8), replace(AUTO, independent_matmuls=v)) for v in ("auto", "bulk", "off"))
    assert auto.strategy.mode is Mode.PIPELINED and auto.paired and "independent_matmuls" not in auto.detail
    assert bulk.strategy.mode is Mode.BULK and bulk.paired
    assert (
        off.strategy.mode is Mode.PIPELINED
        and not off.paired
        and "no independent matmuls: independent_matmuls='off'" in off.detail
    )
    forced, _ = parse({"profile": "h200", "independent_matmuls": "off", "overrides": {"*": "bulk"}}, {})
    assert only(gradients_of_o(8), forced).paired, "a requested strategy wins"
    with pytest.raises(OptionError, match="independent_matmuls"):
        parse({"independent_matmuls": "on"}, {})


def test_own_matmuls_hold_no_bytes() -> None:
    """The terms of w1 and w3 are far apart, so fusing them delays an operand. That is not the price of a weight gradient."""
    d = Dag(8)
    x, grads, products = d.input("x", 8192, 4096), [], []
    for i in range(2):
        gradient = d.call(aten.relu.default, d.mm(d.input(f"d{i}", 8192, 1792), d.input(f"e{i}", 1792, 1792)))
        products.append(d.mm(gradient, d.input(f"w{i}", 1792, 4096)))
        grads.append(d.mm(d.t(gradient), x))
    graph = d.output(d.scatter(d.call(aten.add.Tensor, *products)), *grads)
    memory, (candidate,) = PeakMemory.of(graph, {}), find_candidates(graph)
    match = candidate.match
    assert isinstance(match, Reduction) and {p.node for p in candidate.independent_matmuls} == set(grads)
    one = replace(match, independent=candidate.independent_matmuls[:1])
    assert total_bytes(memory.held_by_independent(match)) == 0 and memory.held_by_independent(match) == []
    held = total_bytes(memory.held_by(match.members))
    assert held > 0 and total_bytes(memory.held_by(one.members)) >= held
    assert total_bytes(memory.held_by_independent(one)) == total_bytes(memory.held_by(one.members)) - held


def test_releasing_saved_bytes_raises_the_peak() -> None:
    """Independent matmuls may shorten lifetimes, and another site may use these bytes. A release takes them back."""
    d = Dag(8)
    memory = PeakMemory.of(d.output(d.mm(d.input("a", 64, 64), d.input("b", 64, 64))), {})
    at = memory.live.index(memory.peak)
    memory.add([(at, at, -512)])
    memory.add([(at, at, 512)])
    assert memory.current_peak == memory.peak
    memory.remove([(at, at, -512)])
    assert memory.current_peak == max(memory.live) == memory.peak + 512


def gradients_of_a_gated_layer() -> Graph:
    """Return a scatter of two products of elementwise gradients, then a gather, and the gradients of two weights."""
    d = Dag(8)
    x, y = d.input("x", 8192, 4096), d.input("y", 1024, 4096)
    gradients = [d.call(aten.relu.default, d.input(f"d{i}", 8192, 1792)) for i in range(2)]
    terms = [d.mm(gradient, d.input(f"w{i}", 1792, 4096)) for i, gradient in enumerate(gradients)]
    scattered = d.scatter(d.call(aten.add.Tensor, *terms))
    product = d.mm(d.gather(y), d.input("w", 4096, 512))
    return d.output(scattered, product, *(d.mm(d.t(gradient), x) for gradient in gradients))


def rewritten(graph: Graph) -> Graph:
    """Return `graph`, rewritten as decided for a machine on which operands are always packed."""
    ops.load()
    options = Options(profile="h200", pack="force", split="off")
    decided = decide(graph, options, "backward", lambda *_: None)
    rewrite(graph, decided.chosen, Outputs(is_backward=True))
    return graph


def test_operands_are_read_where_they_are_packed() -> None:
    """A gradient that a sum packs is written once: other ops of ours read a slice of the packed matrix."""
    graph = rewritten(gradients_of_a_gated_layer())
    (cat,) = graph.find_nodes(op="call_function", target=aten.cat.default)[:1]
    relus = graph.find_nodes(op="call_function", target=aten.relu.default)
    independent = [n for n in graph.nodes if n.target is aten.mm.default]
    assert relus and not independent, "both weight gradients are in ops"
    assert [[user for user in relu.users if user.users] for relu in relus] == [[cat], [cat]]
    assert len([user for user in cat.users if user.target is aten.slice.Tensor]) == 2


def test_only_ops_behind_the_packed_matrix_read_it() -> None:
    """Another matrix of it may need the result of an op before it."""
    d = Dag()
    a, b = (d.call(aten.relu.default, d.input(name, 8, 4)) for name in "ab")
    first, last = (d.call(aten.relu.default, a) for _ in range(2))
    graph, packed = d.output(first, last), PackedOperands()
    e, left, right = Emitter(graph, a, {}), Operand(a, (8, 4)), Operand(b, (8, 4))
    with graph.inserting_before(last):
        joined = packed.emit(e, [left, right], 1)
    with graph.inserting_before(first):
        assert packed.emit_one(e, left) is a and packed.emit_one(e, right) is b
    with graph.inserting_before(graph.output_node()):
        part, transposed = packed.emit_one(e, right), packed.emit_one(e, left.t)
    assert part.target is aten.slice.Tensor and part.args == (joined, 1, 4, 8)
    assert transposed.all_input_nodes[0].args == (joined, 1, 0, 4) and shape_of(transposed) == (4, 8)
    graph.lint()


@pytest.mark.parametrize("kind", ["an input", "a product"])
def test_matrices_that_are_in_memory_anyway_are_read_there(kind: str) -> None:
    d = Dag()
    inputs = [d.input(name, 8, 4) for name in "ab"]
    matrices = inputs if kind == "an input" else [d.mm(x, d.input(f"w{i}", 4, 4)) for i, x in enumerate(inputs)]
    graph, packed = d.output(*matrices), PackedOperands()
    e = Emitter(graph, matrices[0], {})
    with graph.inserting_before(graph.output_node()):
        packed.emit(e, [Operand(m, (8, 4)) for m in matrices], 1)
        assert packed.emit_one(e, Operand(matrices[1], (8, 4))) is matrices[1]


def test_a_saved_plan_takes_as_many_again() -> None:
    graph = gradients_of_o(8)
    plan = decide(graph, AUTO, "backward", lambda *_: None).plan
    saved = {"version": 3, "sites": [d.to_dict() for d in plan.decisions]}
    options, _ = parse({"profile": "h200", "overrides": saved}, {})
    again = only(gradients_of_o(8), options)
    assert again.strategy == plan.decisions[0].strategy and len(again.paired) == len(plan.decisions[0].paired) == 1
    forced, _ = parse({"profile": "h200", "overrides": {"*": str(plan.decisions[0].strategy)}}, {})
    assert only(gradients_of_o(8), forced).paired == ()
    without, _ = parse({"profile": "h200", "overrides": saved, "independent_matmuls": "bulk"}, {})
    assert only(gradients_of_o(8), without).paired == (), "as pack='off' drops the packs of a saved plan"


@pytest.fixture
def slow_link(tmp_path: Path) -> str:
    """Return a profile with which small transfers take longer than small matmuls."""
    profile = json.loads(load("h200").to_json())
    profile["push"] = [[size, 60.0 + i] for i, (size, _) in enumerate(profile["push"])]
    for by_ranks in profile["collectives"].values():
        for ranks, points in by_ranks.items():
            by_ranks[ranks] = [[size, 200.0 + i] for i, (size, _) in enumerate(points)]
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(profile))
    return str(path)


def filled(outcome: Comparison) -> list[str]:
    """Return the kinds of the pipelined sites that have independent matmuls."""
    return [d["kind"] for d in outcome.decisions if d["strategy"].startswith(("pipelined", "direct")) and d["paired"]]


@pytest.mark.parametrize(
    ("variant", "options"),
    [({}, {}), in_full(({"bias": True, "batch": 1}, {"verify": True})), in_full(({"batch": 1}, {"pack": "force"}))],
    ids=["plain", "verify", "packed"],
)
def test_results(pool2: RankPool, slow_link: str, variant: dict[str, Any], options: dict[str, Any]) -> None:
    """A Llama block's outputs and gradients are as close to float64 as eager's, and all ranks choose alike."""
    auto = {"overlap": "auto", "min_bytes": 0, "inner": "aot_eager", "profile": slow_link, **options}
    outcomes = pool2.run(compare, "tests.models.dtensor_llama", variant, auto)
    for outcome in outcomes:
        outcome.check()
        assert filled(outcome) == filled(outcomes[0]) != []


def run(rank: int, world: int, kind: str, profile: str, dynamic: bool | None) -> tuple[bool, list[str]]:
    """Return whether a site with an independent matmul and biases gives eager's results, and its decisions.

    A saved plan forces the form. All values are small integers, so that every sum is exact.
    """

    def function(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        independent = torch.addmm(bias, a, b)
        if kind == "all_gather":
            g = funcol.all_gather_tensor(x, 0, world_name())
            return torch.addmm(bias, g, w), independent, g.relu()
        product = torch.addmm(bias, x, w)
        if kind == "all_reduce":
            return funcol.all_reduce(product, "sum", world_name()), independent
        return funcol.reduce_scatter_tensor(product, "sum", 0, world_name()), independent

    random = torch.Generator().manual_seed(rank)
    inputs = [torch.randint(-3, 4, s, generator=random).float() for s in ((32, 64), (64, 32), (24, 16), (16, 32), (32,))]
    options: dict[str, Any] = {"overlap": "auto", "min_bytes": 0, "inner": "aot_eager", "profile": profile}
    with torch.no_grad():
        (site,) = decisions_of(function, tuple(inputs), options, dynamic)
        options["overrides"] = {"version": 3, "sites": [{**site.to_dict(), "strategy": "pipelined", "paired": ["a @ b"]}]}
        mark = HISTORY.mark()
        with uncached():
            ours = torch.compile(function, backend="ub_overlap", options=options, dynamic=dynamic)(*inputs)
        equal = all(torch.equal(a, b) for a, b in zip(ours, function(*inputs), strict=True))
    decisions = [d for plan in HISTORY.since(mark) for d in plan.decisions]
    return equal, [f"{d.kind.value} {d.strategy.mode.value} {len(d.paired)}" for d in decisions]


@pytest.mark.parametrize(
    ("kind", "dynamic"), [("all_gather", None), ("all_gather", True), ("reduce_scatter", None), ("all_reduce", None)]
)
def test_each_kind(pool2: RankPool, slow_link: str, kind: str, dynamic: bool | None) -> None:
    site = "all_gather_matmul" if kind == "all_gather" else f"matmul_{kind}"
    found = pool2.run(run, kind, slow_link, dynamic)
    assert found == [(True, [f"{site} pipelined 1"])] * 2
