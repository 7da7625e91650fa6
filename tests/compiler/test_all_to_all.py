"""all_to_alls in graphs: windows, the compute that moves into them, assumed sizes, decisions, and look-alikes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, Node

import ub_overlap
from tests.compiler.dags import Dag, aten, c10d
from tests.compiler.rank_compile import build
from tests.cost.machine import PLAIN
from tests.harness.profiles import stored, with_exchanges_as_pushes
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but, in_full
from tests.models.compare import Comparison, error, uncached, values
from tests.models.hf_moe import STRATEGIES
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.cost.grouped_time import grouped_us
from ub_overlap.compiler.cost.policy import Policy
from ub_overlap.compiler.graph.compute import is_compute
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.select.decide import decide
from ub_overlap.compiler.unmatched import find_unmatched
from ub_overlap.compiler.windows.node_times import NodeTimes
from ub_overlap.compiler.windows.widen import widen_windows
from ub_overlap.runtime import ops

AUTO = Options(profile=stored(with_exchanges_as_pushes(load("h200"))), min_bytes=0)
MOE = "tests.models.moe"
compare_name = "tests.models.compare:compare"


class MoEDag(Dag):
    """Builder of graphs with exchanges. Rows are 4096 wide; all parts are even unless given."""

    def exchange(self, x: Node, output: Sequence[int] = (2048, 2048), input: Sequence[int] = (2048, 2048)) -> Node:
        """Append an all_to_all and return its wait."""
        with self.mode:
            value = x.meta["val"].new_empty((sum(output), *x.meta["val"].shape[1:]))
        node = self.graph.call_function(c10d.all_to_all_single.default, (x, list(output), list(input), self.group))
        node.meta["val"] = value
        wait = self.graph.call_function(c10d.wait_tensor.default, (node,))
        wait.meta["val"] = value
        return wait

    def relu(self, x: Node) -> Node:
        return self.call(aten.relu.default, x)


def expert_layer(d: MoEDag, shared: int = 1) -> Graph:
    """dispatch -> expert -> combine -> sum with `shared` products of the input, which are traced last."""
    x, w = d.input("x", 4096, 4096), d.input("primals_1", 4096, 4096)
    back = d.exchange(d.mm(d.exchange(d.relu(x)), w))
    total = d.relu(back)
    for _ in range(shared):
        total = d.call(aten.add.Tensor, total, d.mm(x, w))
    return d.output(total)


def decided(graph: Graph, options: Options = AUTO, phase: str = "forward") -> tuple[list[Decision], list[str]]:
    """Return the decisions, and the targets of the rewritten graph in order."""
    ops.load()
    widen_windows(graph, Policy.of(options), None)
    result = decide(graph, options, phase, lambda *_: None)
    rewrite(graph, result.chosen, Outputs(), layout=result.layout)
    short = {"start_all_to_all": "start", "finish_all_to_all": "finish", "all_to_all_single": "plain"}
    names = [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"]
    return list(result.plan.decisions), [short.get(n, n) for n in names if n not in ("wait_tensor", "permute")]


def strategies(decisions: list[Decision]) -> list[str]:
    return [str(d.strategy) if d.reason is None else d.reason.value for d in decisions]


def test_shared_expert_moves_into_the_windows() -> None:
    """One product hides the dispatch, the other, which is left behind the combine, the combine."""
    decisions, order = decided(expert_layer(MoEDag(), shared=2))
    assert strategies(decisions) == ["split", "split"]
    assert order == ["relu", "start", "mm", "finish", "mm", "start", "mm", "finish", "relu", "add", "add"]
    assert [d.kind.value for d in decisions] == ["all_to_all"] * 2
    assert [d.paired for d in decisions] == [("mm_default_1",), ("mm_default_2",)]
    assert all(d.window is not None and d.window.exposed_us == 0 for d in decisions)


def test_one_filler_hides_one_exchange() -> None:
    """The first takes it; the other has nothing left."""
    decisions, order = decided(expert_layer(MoEDag(), shared=1))
    assert strategies(decisions) == ["split", "no_gain"] and "us at most" in decisions[1].detail
    assert order == ["relu", "start", "mm", "finish", "mm", "plain", "relu", "add"]


def test_weight_gradients_move_behind_the_start() -> None:
    """They stand in front of the exchange that needs the input gradient, with the cast that only they feed."""
    d = MoEDag()
    g, x, w = d.input("tangents_1", 4096, 4096), d.input("x", 4096, 4096), d.input("primals_1", 4096, 4096)
    gradient = d.call(torch.ops.prims.convert_element_type.default, d.mm(d.t(g), x), torch.float32)
    decisions, order = decided(d.output(d.relu(d.exchange(d.mm(g, w))), gradient), phase="backward")
    assert strategies(decisions) == ["split"] and decisions[0].paired == ("mm_default",)
    assert order == ["mm", "start", "mm", "finish", "convert_element_type", "relu"]


def test_gradients_move_with_their_reductions() -> None:
    """The weight gradient is reduced right behind its product, as data parallelism has it: both move behind the start."""
    d = MoEDag()
    g, x, w = d.input("tangents_1", 4096, 4096), d.input("x", 4096, 4096), d.input("primals_1", 4096, 4096)
    reduced = d.scatter(d.mm(d.t(g), x))
    graph = d.output(d.relu(d.exchange(d.mm(g, w))), reduced)
    assert widen_windows(graph, Policy.of(AUTO), None) > 0
    order = [n.name for n in graph.nodes]
    assert order.index("mm_default_1") < order.index("all_to_all_single_default") < order.index("mm_default")
    assert order.index("mm_default") < order.index("reduce_scatter_tensor_default") < order.index("relu_default")


def test_gathers_of_parameters_move_with_their_readers() -> None:
    """The weight of the shared expert is gathered in front of it, as sharded weights are: both move into the window. The weight
    that a later product needs is gathered where it was."""
    d = MoEDag()
    x, w, later = (d.input(name, rows, 4096) for name, rows in (("x", 4096), ("primals_1", 2048), ("primals_2", 2048)))
    read = d.relu(d.exchange(d.relu(x)))
    whole, second = d.gather(later), d.gather(w)
    shared, last = d.mm(x, second), d.mm(read, whole)
    graph = d.output(shared, last)
    assert widen_windows(graph, Policy.of(AUTO), None) == 3
    order = {n: i for i, n in enumerate(graph.nodes)}
    assert order[second] < order[shared] < order[read] < order[whole] < order[last]
    graph.lint()


@pytest.mark.parametrize("why", ["reads the result", "behind a write", "random", "read by the host", "alone"])
def test_what_may_not_move(why: str) -> None:
    """Look-alikes of a product behind the exchange."""
    d = MoEDag()
    x, w = d.input("x", 4096, 4096), d.input("primals_1", 4096, 4096)
    back = d.exchange(d.relu(x))
    read = d.relu(back)
    operand = x
    if why == "reads the result":
        operand = d.call(aten.add.Tensor, x, read)
    elif why == "behind a write":
        d.call(aten.mul_.Tensor, x, 2.0)
    elif why == "random":
        operand = d.call(aten.rand_like.default, x)
    elif why == "read by the host":
        number = d.call(aten.mul.Tensor, x, 3.0)
        number.meta["unbacked_bindings"] = {"u0": ()}
        operand = d.call(aten.add.Tensor, x, number)
    more = [] if why == "alone" else [d.mm(operand, w)]
    decisions, _ = decided(d.output(read, *more))
    assert strategies(decisions) == ["no_gain"]


def test_times_of_grouped_matmuls() -> None:
    """The clock has the cost model's times of the forward, the input's gradient and the weights' gradient of experts."""
    d = MoEDag()
    x, w = d.input("x", 4096, 2048), d.input("w", 8, 2048, 1024)
    ends = d.call(torch.ops.prims.convert_element_type.default, d.input("ends", 8), torch.int32)
    product = d.call(aten._grouped_mm.default, x, w, ends)
    turned = d.call(aten.permute.default, w, [0, 2, 1])
    gradients = [
        d.call(aten._grouped_mm.default, product, turned, ends),
        d.call(aten._grouped_mm.default, d.t(x), product, ends),
    ]
    times = NodeTimes.of(d.output(*gradients), load("h200"), {})
    found = [times.us(n) for n in (product, *gradients)]
    rows = grouped_us(load("h200"), "bfloat16", 8, 4096, 1024, 2048, "m")
    assert found == [
        rows,
        *(grouped_us(load("h200"), "bfloat16", 8, *sizes) for sizes in ((4096, 2048, 1024, "m"), (2048, 1024, 4096, "k"))),
    ]
    assert found == pytest.approx([2 * 4096 * 2048 * 1024 / 450e6] * 3, rel=0.5)
    assert all(map(is_compute, (product, *gradients))) and not is_compute(ends)


def test_counts_and_uneven_constants_stay() -> None:
    """Counts are integers. Uneven constants are split on request alone: other ranks may trace other sizes."""
    d = MoEDag()
    x, w = d.input("x", 4096, 4096), d.input("primals_1", 4096, 4096)
    counts = d.exchange(d.call(torch.ops.prims.convert_element_type.default, x, torch.int64))
    uneven = d.exchange(x, (2048, 1024), (2048, 2048))
    graph = d.output(counts, d.relu(uneven), d.mm(x, w))
    plan = decide(graph, AUTO, "forward", lambda *_: None).plan
    assert strategies(list(plan.decisions)) == ["dtype_unsupported", "uneven_shards"]
    assert find_unmatched(plan) == [plan.decisions[1]]  # a user can do nothing about counts
    asked = parse({"profile": "h200", "overrides": [{"strategy": "split"}]}, frozenset())[0]
    found = decide(graph, asked, "forward", lambda *_: None).plan
    assert strategies(list(found.decisions)) == ["dtype_unsupported", "split"]
    again = Plan.from_json(found.to_json())
    assert again.digest == found.digest and again.decisions == found.decisions


def test_ranks_with_other_rows_agree() -> None:
    """A plan has no rows of an exchange in what ranks compare."""
    plans = []
    for output in ((2048, 1024), (1024, 2048)):
        d = MoEDag()
        x, w = d.input("x", 4096, 4096), d.input("primals_1", 4096, 4096)
        graph = d.output(d.relu(d.exchange(x, output)), d.mm(x, w))
        options = parse({"profile": "h200", "overrides": [{"strategy": "split"}]}, frozenset())[0]
        plans.append(decide(graph, options, "forward", lambda *_: None).plan)
    assert plans[0].shared_digest == plans[1].shared_digest


@pytest.mark.parametrize(
    ("strategy", "wanted", "text"),
    [
        ("none", "disabled_by_user", "none"),
        ("bulk", "strategy_illegal", "it is split, or none"),
        ("pipelined", "strategy_illegal", "it is split, or none"),
        ("one_shot", "strategy_illegal", "it is split, or none"),
        ("split:chunks=4", "strategy_illegal", "no chunks"),
    ],
)
def test_requested_strategies(strategy: str, wanted: str, text: str) -> None:
    options = parse({"profile": "h200", "overrides": [{"kind": "all_to_all", "strategy": strategy}]}, frozenset())[0]
    decisions, _ = decided(expert_layer(MoEDag(), shared=2), options)
    assert strategies(decisions) == [wanted] * 2 and text in decisions[0].detail


@pytest.mark.parametrize(
    "options", [replace(AUTO, split="off"), replace(AUTO, overlap="off"), replace(AUTO, min_bytes=1 << 30)]
)
def test_options_leave_it_alone(options: Options) -> None:
    decisions, order = decided(expert_layer(MoEDag(), shared=2), options)
    assert "start" not in order and all(d.reason is not None for d in decisions)


def test_measured_curves_decide() -> None:
    """Without a measured curve the time of the plain exchange is assumed, and every decision says so."""
    decisions, _ = decided(expert_layer(MoEDag(), shared=1), replace(AUTO, profile="h200"))
    assert strategies(decisions) == ["split", "split"]
    assert all("no times of all_to_all, which is assumed to take as long as an all_gather" in d.detail for d in decisions)
    for us, wanted in ((1.0, ["no_gain"] * 2), (1e4, ["split"] * 2)):
        curves = {**load("h200").collectives, "all_to_all": {2: ((1.0, us), (1e9, us + 1.0))}}
        path = stored(replace(load("h200"), collectives=curves))
        decisions, _ = decided(expert_layer(MoEDag(), shared=1), replace(AUTO, profile=path))
        assert strategies(decisions) == wanted, [d.detail for d in decisions]
        assert not any("assumed" in d.detail for d in decisions)


def test_memory_limits_what_moves() -> None:
    """Moved results live longer; with too little memory for them and for the landing memory nothing is split."""
    decisions, _ = decided(expert_layer(MoEDag(), shared=2), replace(AUTO, split_bytes=1 << 20))
    assert strategies(decisions) == ["no_gain"] * 2


# --- a real block -------------------------------------------------------------------------------------------------------

SPLIT: dict[str, Any] = {"inner": "aot_eager", "overrides": [{"kind": "all_to_all", "strategy": "split"}]}


@pytest.fixture(scope="module")
def slow_profile() -> str:
    """Return a profile in which a test's matmuls take 500 us, and exchanges 100 us."""
    compute = replace(PLAIN.compute, tflops={"bfloat16": 5e-5})
    slow = replace(PLAIN, name="slow", compute=compute, push=((8, 1.0), (8e6, 1e6)))
    return stored(with_exchanges_as_pushes(slow))


def test_auto(pool2: RankPool, slow_profile: str) -> None:
    """Each exchange is hidden by what step (A) of expert parallelism gives it. The predictions of both ranks are equal."""
    options = {"profile": slow_profile, "min_bytes": 0, "inner": "aot_eager"}
    outcomes = pool2.run(compare_name, MOE, {}, options)
    for outcome in outcomes:
        outcome.check(3.0)
        found = {d["id"]: d["paired"] for d in outcome.decisions if d["strategy"] == "split"}
        assert list(found) == ["forward.1", "forward.2", "backward.0", "backward.1"]
        assert all(d["window"]["exposed_us"] == 0 for d in outcome.decisions if d["strategy"] == "split")
        assert ["shared.0" in found["forward.1"][0], "shared.1" in found["forward.2"][0]] == [True, True]
        assert all("shared" in text for text in found["backward.0"]), found
        assert any("grouped_mm" in text for text in found["backward.1"]), found
    plans = [[(d["id"], d["strategy"], d["window"], d["paired"], d["predicted"]) for d in o.decisions] for o in outcomes]
    assert plans[0] == plans[1]


@pytest.mark.tier("full")
def test_auto_next_to_sharded_weights(pool2: RankPool, slow_profile: str) -> None:
    """The gathers of the shared expert's weights move into the window of the dispatch with its products."""
    options = {"profile": slow_profile, "min_bytes": 0, "inner": "aot_eager"}
    for outcome in pool2.run(compare_name, MOE, {"other": "fsdp"}, options):
        outcome.check(3.0)
        sites = [d for d in outcome.decisions if d["phase"] == "forward"]
        dispatch = next(i for i, d in enumerate(sites) if d["kind"] == "all_to_all" and d["dtype"] == "bfloat16")
        combine = next(i for i, d in enumerate(sites) if i > dispatch and d["kind"] == "all_to_all")
        assert sites[dispatch]["strategy"] == "split" and sites[dispatch]["window"]["exposed_us"] == 0
        assert any("all_gather" in d["kind"] for d in sites[dispatch + 1 : combine])


@pytest.mark.parametrize(
    "variant",
    [
        {},
        in_full({"form": "loop", "routing": "one"}),
        in_full({"routing": "one"}),
        in_full({"shared": False, "tokens": (24, 0)}),
        in_full({"other": "fsdp"}),
    ],
    ids=["skewed", "loop", "one_expert", "no_tokens", "fsdp"],
)
def test_block(pool2: RankPool, variant: dict[str, Any]) -> None:
    """Results and gradients are the plain graph's: all rows for one expert, empty experts, a rank without tokens."""
    for outcome in pool2.run(compare_name, MOE, variant, SPLIT):
        check_exchanges(outcome)


@pytest.mark.parametrize("ranks", full_but([2], [2, 4]))
def test_block_next_to_tensor_parallelism(pool2: RankPool, pool4: RankPool, ranks: int) -> None:
    """The gathers and scatters of tensor parallelism are fused, the exchanges are split. 4 ranks: 2 groups of 2 of each."""
    options = {**SPLIT, "overlap": "force", "min_bytes": 0}
    for outcome in (pool2 if ranks == 2 else pool4).run(compare_name, MOE, {"other": "tp"}, options):
        check_exchanges(outcome)
        fused = [d for d in outcome.decisions if d["kind"] != "all_to_all"]
        kinds = [(phase, kind) for phase in ("forward", "backward") for kind in ("all_gather_matmul", "matmul_reduce_scatter")]
        assert sorted((d["phase"], d["kind"]) for d in fused) == sorted(kinds)
        assert all(d["strategy"].startswith("pipelined") and d["ranks"] == 2 for d in fused), fused


def check_exchanges(outcome: Comparison) -> None:
    """Check the results, and that dispatch and combine are split in forward and backward. Counts stay a plain exchange."""
    outcome.check(3.0)
    found = [(d["phase"], d["strategy"], d["reason"]) for d in outcome.decisions if d["kind"] == "all_to_all"]
    counts, exchanges = found[0], found[1:]
    assert counts == ("forward", "none", "dtype_unsupported")
    assert [phase for phase, *_ in exchanges] == ["forward"] * 2 + ["backward"] * 2
    assert {strategy for _, strategy, _ in exchanges} == {"split"}


@pytest.mark.tier("full")
def test_generated_code(pool2: RankPool, slow_profile: str) -> None:
    """Inductor keeps matmuls between start and finish, whose input no other value is written to, and results are eager's."""
    options = {"profile": slow_profile, "min_bytes": 0}
    for errors, programs in pool2.run(generated, options):
        assert max(errors.values()) < 3e-2, errors
        assert len(programs) == 2
        for text in programs:
            lines = text[text.index("def call(") :].splitlines()
            sites = [re.search(r"(start|finish)_all_to_all.*/(\w+\.\d)", line) for line in lines]
            places = {found[0]: i for i, found in enumerate(sites) if found}
            starts, finishes = sorted(places.values())[::2], sorted(places.values())[1::2]
            assert len(starts) == len(finishes) == 2
            for begin, end in zip(starts, finishes, strict=True):
                between = lines[begin + 1 : end]
                assert any("mm" in line and ("extern_kernels" in line or "_grouped_mm" in line) for line in between), between
                (name,) = re.findall(r"start_all_to_all\.default\((\w+)", lines[begin])
                assert "finish_all_to_all.default" in lines[end] and f", {name}, " in lines[end]
                assert not any(re.search(rf"= {name}; del|\bdel {name}\b|out={name}\b", line) for line in between)


def generated(rank: int, world: int, options: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return the differences from eager, and the programs with exchanges."""
    eager = build(rank, world, MOE, {})
    truth = values(eager, eager.module)
    case = build(rank, world, MOE, {})
    compiled = torch.compile(case.module, backend="ub_overlap", options=options)
    with uncached():
        found, written = run_and_get_code(lambda: values(case, compiled))
    return {n: error(found[n], truth[n], n) for n in truth}, [text for text in written if "start_all_to_all" in text]


@pytest.mark.tier("full")
def test_verify_explain_and_saved_plan(pool2: RankPool) -> None:
    """Results equal the plain exchange's, the report names the places, and a saved plan decides the same."""
    for measured, text, first, second in pool2.run(explained):
        assert measured == [0.0] * 4 and "in slot 0" in text
        assert first == second and [strategy for _, strategy in first] == ["none", "split", "split", "split", "split"]


def explained(rank: int, world: int) -> tuple[list[float], str, list[tuple[str, str]], list[tuple[str, str]]]:
    case = build(rank, world, MOE, {})
    with case.context(), uncached():  # type: ignore[misc]
        report = ub_overlap.explain(case.module, {**SPLIT, "verify": True})(*case.inputs)
        again = ub_overlap.explain(case.module, {"inner": "aot_eager", "overrides": report.to_dict()})(*case.inputs)
    decisions = [[(d.id, str(d.strategy)) for d in r.decisions] for r in (report, again)]
    errors = [d.error for d in report.decisions if d.error is not None]
    return errors, "\n".join(d.detail for d in report.decisions), decisions[0], decisions[1]


@pytest.mark.tier("full")
def test_shards_of_experts(pool4: RankPool) -> None:
    """Two ranks share the experts, and each of them the weights with another: gathers and reductions of both groups."""
    options = {"inner": "aot_eager", "overrides": [{"strategy": "split"}]}
    for outcome in pool4.run(compare_name, MOE, {"other": "fsdp"}, options):
        outcome.check(3.0)
        groups = Counter((d["kind"], d["group"]) for d in outcome.decisions if d["strategy"] == "split")
        assert sorted(groups.values()) == [3, 3, 3, 3, 4], groups


BLOCKS = [
    ("mixtral", "random"),
    ("qwen3_moe", "random"),
    ("deepseek_v3", "random"),
    ("mixtral", "first"),
    ("deepseek_v3", "absent"),
]


@pytest.mark.tier("full")
@pytest.mark.parametrize(("kind", "routing"), BLOCKS)
def test_blocks_of_transformers(hf2: RankPool, kind: str, routing: str) -> None:
    """With experts on two ranks they compute what they do with all experts on one: also where one rank gets all tokens, and
    where one has none."""
    check_block(hf2, kind, routing)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("kind", "routing"), [("mixtral", "absent"), ("qwen3_moe", "first"), ("deepseek_v3", "random")])
def test_blocks_of_transformers_on_four_ranks(hf4: RankPool, kind: str, routing: str) -> None:
    """Each rank has one expert."""
    check_block(hf4, kind, routing)


@pytest.mark.tier("full")
def test_a_block_of_transformers_by_the_cost_model(hf2: RankPool, slow_profile: str) -> None:
    """The shared expert is worth hiding the exchanges behind on a slow machine, but not where an exchange takes 1 us."""
    curves = {**load("h200").collectives, "all_to_all": {2: ((1.0, 1.0), (1e9, 2.0))}}
    fast_profile = stored(replace(load("h200"), collectives=curves))
    for profile, strategies in ((slow_profile, STRATEGIES), (fast_profile, ["none"] * 5)):
        options = {"profile": profile, "min_bytes": 0, "inner": "aot_eager"}
        for worst, found in hf2.run("tests.models.hf_moe:compare_block", "deepseek_v3", options):
            assert worst < 1e-5
            assert [strategy for *_, strategy in found] == strategies, found


def check_block(pool: RankPool, kind: str, routing: str) -> None:
    for worst, found in pool.run("tests.models.hf_moe:compare_block", kind, SPLIT, routing):
        assert worst < 1e-5
        assert [strategy for *_, strategy in found] == STRATEGIES, found
