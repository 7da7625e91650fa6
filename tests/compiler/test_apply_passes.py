"""ub_overlap.apply_passes: the passes on graphs that make_fx has traced, mostly of a whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import ub_overlap
from tests.harness.ranks import RankPool
from ub_overlap._torch_compat import FakeStore, caches_off, compile_fx
from ub_overlap.compiler.graph.emitter import Emitter
from ub_overlap.compiler.graph.graph_inputs import GraphInputs
from ub_overlap.compiler.graph.joint_graph import AUTOGRAD_BACKWARD, is_in_backward
from ub_overlap.compiler.passes import RewritePass
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.session import transport

RANKS = "tests.compiler.rank_apply_passes"
FORCE = {"overlap": "force"}
SPLIT: dict[str, Any] = {"overlap": "off", "overrides": [{"strategy": "split"}]}
ROUNDING = 64 * torch.finfo(torch.float32).eps


def kinds(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(f"{row['kind']} {row['strategy']}" for row in rows)


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_tensor_parallel_step(pool2: RankPool) -> None:
    """Forward and backward of a sequence-parallel Llama block: all sites of both halves, in one plan."""
    for outcome in pool2.run(f"{RANKS}:whole_step", "tests.models.dtensor_llama", {}, 9, FORCE, {**FORCE, "verify": True}):
        for worst, rows in outcome:
            assert worst <= ROUNDING
            assert kinds(rows) == {"all_gather_matmul pipelined": 4, "matmul_reduce_scatter pipelined": 4}
            assert [row["id"] for row in rows] == [f"step.{i}" for i in range(8)] and {row["phase"] for row in rows} == {"step"}


def test_sharded_step(pool2: RankPool) -> None:
    """ZeRO-3 in the graph: each gather of a parameter and each reduction of a gradient is split."""
    for outcome in pool2.run(f"{RANKS}:whole_step", "tests.models.zero3", {"layers": 2}, 4, SPLIT, {**SPLIT, "min_bytes": 0}):
        for worst, rows in outcome:
            assert worst == 0.0
            assert kinds(rows) == {"all_gather split": 4, "reduce_scatter split": 4}
            starts = [row["window"]["starts"] for row in rows]
            assert starts[:3] == [0, 1, 2], "gathers of parameters start before all that computes"


def test_reports_and_compilers(pool2: RankPool) -> None:
    """explain runs the graph; its plan fits the same graph again; compilers take the result as it is, and plan nothing."""
    for outcome in pool2.run(f"{RANKS}:reported"):
        assert outcome["phase"] == "step" and outcome["strategies"] == ["split", "none", "split", "none"]
        assert outcome["saved"] == outcome["strategies"] and outcome["calls"] == [1, 1]
        assert max(outcome["errors"]) <= ROUNDING and outcome["plans of compilers"] == 0


def test_lookalikes(pool2: RankPool) -> None:
    """A matmul that reads other rows than the gathered ones, and tensors that are written between collective and matmul."""
    for outcome in pool2.run(f"{RANKS}:alike"):
        for name, (worst, rows) in outcome.items():
            assert worst == 0.0 and [row["strategy"] for row in rows] == ["none"], (name, rows)
            assert rows[0]["reason"] and rows[0]["detail"] and rows[0]["phase"] == "forward", rows


def gathered(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD) @ w


def traced(function: Callable[..., Any] = gathered, **settings: Any) -> tuple[GraphModule, list[Tensor]]:
    inputs = [torch.randn(4, 8), torch.randn(8, 8)]
    return make_fx(function, **settings)(*inputs), inputs


def of_modules() -> GraphModule:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8)))


def of_functions() -> GraphModule:
    return torch.fx.symbolic_trace(lambda x: torch.nn.functional.relu(x))


def above_autograd() -> GraphModule:
    return torch.export.export(nn.Linear(8, 8), (torch.randn(4, 8),)).graph_module


@pytest.mark.parametrize(
    ("build", "inputs", "message"),
    [
        (of_modules, 1, "not a graph of ATen ops: it calls modules"),
        (of_functions, 1, "not a graph of ATen ops: it calls functions of Python"),
        (above_autograd, 3, "not a graph of ATen ops: it was traced above autograd"),
        (lambda: nn.Linear(8, 8), 1, "not an FX graph"),
        (of_modules, 2, "other inputs than those of the graph"),
    ],
)
def test_other_graphs(build: Callable[[], Any], inputs: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ub_overlap.apply_passes(build(), [torch.randn(4, 8)] * inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget": 0},
        {"defer_weight_gradients": True},
        {"fp8": "all"},
        {"split_tokens": "force"},
        {"mode": "max-autotune"},
        {"max_autotune": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_one_graph_cannot_follow(fake_group: None, options: dict[str, Any]) -> None:
    gm, inputs = traced()
    before = str(gm.graph)
    with pytest.raises(OptionError, match=next(iter(options))):
        ub_overlap.apply_passes(gm, inputs, options=options)
    assert str(gm.graph) == before


@pytest.mark.parametrize("settings", [{"parameters": [2]}, {"parameters": ["w"]}, {"parameters": [True]}, {"phase": "joint"}])
def test_bad_arguments(fake_group: None, settings: dict[str, Any]) -> None:
    gm, inputs = traced()
    with pytest.raises(OptionError, match="positions of inputs|unknown phase"):
        ub_overlap.apply_passes(gm, inputs, **settings)


def test_a_graph_is_rewritten_once(fake_group: None) -> None:
    gm, inputs = traced()
    ub_overlap.apply_passes(gm, inputs, options=FORCE)
    with pytest.raises(OptionError, match="rewritten before"):
        ub_overlap.apply_passes(gm, inputs)
    with pytest.raises(OptionError, match="keeps its options"):
        ub_overlap.explain(gm, FORCE)


@pytest.mark.tier("test")
def test_inductor_keeps_the_order(fake_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph of inference, Inductor moves nodes towards their readers between our two passes: starts to their finishes."""

    def layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        for shard in (first, second):
            x = torch.tanh(x @ funcol.all_gather_tensor(shard, 0, dist.group.WORLD))
        return x

    monkeypatch.setattr(transport, "unsupported_reason", lambda *_: None)
    inputs = [torch.randn(8, 8), torch.randn(4, 8), torch.randn(4, 8)]
    gm = make_fx(layers)(*inputs)
    ub_overlap.apply_passes(gm, inputs, parameters=(1, 2), options=SPLIT)

    def order(graph: Graph) -> list[str]:
        calls = (n for n in graph.nodes if n.op == "call_function")
        return [" ".join([str(n.target), *(a for a in n.args if isinstance(a, str))]) for n in calls]

    seen: list[list[str]] = []
    rewrite = RewritePass.__call__

    def recording(self: RewritePass, graph: Graph) -> None:
        seen.append(order(graph))
        rewrite(self, graph)
        seen.append(order(graph))

    monkeypatch.setattr(RewritePass, "__call__", recording)
    expected = order(gm.graph)
    with caches_off(), torch.no_grad():
        compile_fx(gm, inputs, config_patches=ub_overlap.passes())
    moved, kept = seen
    assert sum("start_collective" in name for name in expected) == 2
    assert moved != expected and sorted(moved) == sorted(expected), "Inductor moves nothing here: the test shows nothing"
    assert kept == expected


def test_reduce_dtype_needs_marks_of_autograd(fake_group: None) -> None:
    gm, inputs = traced()
    with pytest.raises(OptionError, match="no marks of autograd"):
        ub_overlap.apply_passes(gm, inputs, options={"reduce_dtype": "bfloat16"}, phase="step")


def test_a_write_that_is_read_through_a_view(fake_group: None) -> None:
    def written(x: Tensor, w: Tensor) -> Tensor:
        g = funcol.all_gather_tensor(x, 0, dist.group.WORLD).clone()
        g.view(2, 4, 8)[0].mul_(2)
        return g @ w

    gm, inputs = traced(written)
    with pytest.raises(OptionError, match="writes to memory that is read afterwards"):
        ub_overlap.apply_passes(gm, inputs)


def test_parameters(fake_group: None) -> None:
    """Positions that the user gives, nn.Parameters among the inputs or held by the graph, else all floating-point inputs."""
    gm, inputs = traced()
    weight = nn.Parameter(inputs[1])
    held = make_fx(lambda x: gathered(x, weight))(inputs[0])

    def names(graph: GraphModule, given: list[Any], positions: tuple[int, ...] | None) -> set[str]:
        return {n.name for n in GraphInputs.of_traced(graph.graph, given, positions).parameters_in(graph.graph)}

    x, w = (n.name for n in gm.graph.find_nodes(op="placeholder"))
    attribute = held.graph.find_nodes(op="get_attr")[0].name
    assert names(gm, inputs, (1,)) == {w} and names(gm, inputs, ()) == set()
    assert names(gm, [inputs[0], weight], None) == {w} and names(gm, inputs, None) == {x, w}
    assert names(held, inputs[:1], None) == {attribute} and names(held, inputs[:1], (0,)) == {x, attribute}


@pytest.mark.parametrize("marks_all", [True, False])
def test_new_nodes_are_in_the_half_of_those_that_they_replace(fake_group: None, marks_all: bool) -> None:
    """A sum of two reductions is reduced once: in backward where the sum is. Rules with a phase and reduce_dtype read it."""

    def summed(x: Tensor, w: Tensor) -> Tensor:
        first, second = (funcol.reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD) for y in (x @ w, x @ w.sin()))
        return first + second

    gm, inputs = traced(summed)
    known = [n for n in gm.graph.nodes if n.op == "call_function"]
    for node in known if marks_all else known[-1:]:
        node.meta[AUTOGRAD_BACKWARD] = True
    ub_overlap.apply_passes(gm, inputs, options=FORCE, phase="step")
    new = [n for n in gm.graph.nodes if n.op == "call_function" and n not in known]
    assert len([n for n in new if "reduce_scatter" in str(n.target)]) == 1 and all(map(is_in_backward, new))
    with gm.graph.inserting_after(new[-1]):
        assert is_in_backward(Emitter(gm.graph, new[-1], {}).call(torch.ops.aten.neg.default, new[-1]))


@pytest.mark.parametrize("marked", [False, True])
def test_a_gather_that_backward_repeats_stays(fake_group: None, marked: bool) -> None:
    """Two gathers of one tensor are merged, but not across the halves of a step: a pass of the user has repeated one there."""
    gm, inputs = traced(lambda x, w: (gathered(x, w), gathered(x, w * 2)))
    gathers = [n for n in gm.graph.nodes if "all_gather_into_tensor" in str(n.target)]
    if marked:
        gathers[1].prev.meta["autograd_backward"] = True
    mark = HISTORY.mark()
    ub_overlap.apply_passes(gm, inputs, options={"overlap": "force"})
    (plan,) = HISTORY.since(mark)
    assert plan.phase == ("step" if marked else "forward")
    assert [str(d.strategy) for d in plan.decisions].count("merged") == (0 if marked else 1)
