"""One all_reduce for the amaxes of all gathered weights, and the look-alikes that must keep their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

import ub_overlap.runtime.ops  # noqa: F401  (registers the ops)
from tests.fp8.rank_fp8 import NO_OVERLAP, both
from tests.harness.ranks import RankPool
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.joint.joint_decision import joint_decision, record_decision
from ub_overlap.compiler.joint.merge.merge_amax_reductions import merge_amax_reductions
from ub_overlap.compiler.plan.reasons import Reason

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
ALL_REDUCE = c10d.all_reduce.default


@pytest.fixture(autouse=True)
def groups_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that are not run name groups that do not exist."""
    monkeypatch.setattr(compat, "group_size", lambda name: 2)


class Amaxes:
    """A graph that reduces the amaxes of weights over ranks and returns the scales."""

    def __init__(self) -> None:
        self.graph, self._mode, self._scales = Graph(), FakeTensorMode(), list[Node]()
        with self._mode:
            self._weight = torch.empty(16, 16, dtype=torch.bfloat16)

    def weight(self, name: str) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self._weight
        return node

    def call(self, target: Callable[..., object], *args: object) -> Node:
        node = self.graph.call_function(target, args)
        with self._mode:
            node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def reduce(self, value: Node, op: str = "max", group: str = "0") -> None:
        amax = self.call(aten.amax.default, self.call(aten.abs.default, value), [])
        reduced = self.call(ALL_REDUCE, amax, op, group)
        record_decision(reduced, carries_scales=True)
        self._scales.append(self.call(aten.mul.Tensor, self.call(c10d.wait_tensor.default, reduced), 0.5))

    def merge(self) -> list[Node]:
        """Merge, and return the all_reduces that are left."""
        self.graph.output(tuple(self._scales))
        before = len(self.graph.find_nodes(op="call_function", target=ALL_REDUCE))
        removed = merge_amax_reductions(self.graph)
        self.graph.lint()
        left = self.graph.find_nodes(op="call_function", target=ALL_REDUCE)
        assert removed == before - len(left)
        return left


def test_amaxes_of_weights() -> None:
    """Each scale reads its own number, also where a matmul stands between the all_reduces."""
    g = Amaxes()
    a, b, c = (g.weight(f"primals_{i}") for i in (1, 2, 3))
    g.reduce(a)
    product = g.call(aten.mm.default, a, b)
    g.reduce(b)
    g.reduce(g.call(aten.mul.Tensor, c, 2))
    (reduced,) = g.merge()
    assert joint_decision(reduced).carries_scales and tuple(reduced.meta["val"].shape) == (3,)
    order = {n: i for i, n in enumerate(g.graph.nodes)}
    (cat,) = reduced.all_input_nodes
    assert all(order[n] < order[reduced] for n in cat.all_input_nodes) and product in order
    scales = g.graph.output_node().all_input_nodes
    assert [n.all_input_nodes[0].args[2] for n in scales] == [0, 1, 2]


@pytest.mark.parametrize("why", ["matmul", "collective", "tangent", "written", "random", "group", "sum"])
def test_what_keeps_its_own(why: str) -> None:
    """An amax that is not ready when the graph begins, and another group or reduction."""
    g = Amaxes()
    a, b = g.weight("primals_1"), g.weight("tangents_1" if why == "tangent" else "primals_2")
    g.reduce(a)
    if why == "matmul":
        b = g.call(aten.mm.default, b, b)
    elif why == "collective":
        b = g.call(c10d.wait_tensor.default, g.call(c10d.all_gather_into_tensor.default, b, 2, "0"))
    elif why == "written":
        g.call(aten.mul_.Tensor, b, 2)
    elif why == "random":
        b = g.call(aten.bernoulli.p, b, 0.5)
    g.reduce(b, op="sum" if why == "sum" else "max", group="1" if why == "group" else "0")
    assert len(g.merge()) == 2


def test_gathered_weights(pool2: RankPool) -> None:
    """In-graph ZeRO-3 in float8 has one all_reduce of scales, and the results of one for each weight."""
    options = {"fp8": {"recipe": "tensorwise"}, "inner": "aot_eager", **NO_OVERLAP}
    for off, on in pool2.run(both, "tests.models.zero3", {"layers": 2, "dtype": torch.bfloat16}, options):
        scales = [sum(d.reason is Reason.SCALES for d in run.decisions) for run in (off, on)]
        assert scales == [4, 1]
        assert all(torch.equal(off.values[name], on.values[name]) for name in off.values)
