"""Hybrid sharding: all_reduce, then reduce_scatter becomes reduce_scatter, then all_reduce; and graphs that must stay."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph

from tests.compiler.dags import Dag, c10d
from tests.compiler.rank_compile import FORCE
from tests.harness.ranks import RankPool
from tests.models.compare import Comparison, compare, uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.joint.joint_decision import joint_decision
from ub_overlap.compiler.joint.scatter_first import MeshDim, mesh_dim, scatter_first
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.passes import JointPass
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.reports.report import Report
from ub_overlap.compiler.select.decide import decide

Function = Callable[[Tensor], Tensor | tuple[Tensor, ...]]
OPTIONS = {**FORCE, "scatter_first": True}
GROUPS: dict[str, str] = {}
cast = torch.ops.prims.convert_element_type.default


def make_groups() -> None:
    """Make a 2 x 2 mesh, and groups that meet those of its last dim in one rank each without being a dim of it."""
    if not GROUPS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for name in ("outer", "inner"):
            GROUPS[name] = mesh.get_group(name).group_name
        groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 3], [1, 2])]
        GROUPS["diagonal"] = groups[0 if dist.get_rank() in (0, 3) else 1].group_name


def reduce(x: Tensor, op: str = "sum", group: str = "outer") -> Tensor:
    return funcol.all_reduce(x, op, GROUPS[group])


def scatter(x: Tensor, dim: int = 0, op: str = "sum", group: str = "inner") -> Tensor:
    return funcol.reduce_scatter_tensor(x.contiguous(), op, dim, GROUPS[group])


def padded(x: Tensor) -> Tensor:
    """Return the scatter of 7 rows, as DTensor traces it."""
    first, last = torch.ops.aten.split(reduce(x)[:7], 4)
    return scatter(torch.cat([first, torch.constant_pad_nd(last, [0, 0, 0, 1])]))


def read_twice(x: Tensor) -> tuple[Tensor, ...]:
    total = reduce(x)
    return scatter(total), total.relu()


def view_read_twice(x: Tensor) -> tuple[Tensor, ...]:
    total = reduce(x).view(4, 12)
    return scatter(total), total.relu()


MOVED: dict[str, Function] = {
    "plain": lambda x: scatter(reduce(x)),
    "avg": lambda x: scatter(reduce(x, "avg"), op="avg"),
    "view": lambda x: scatter(reduce(x).view(4, 12)),
    "cast before": lambda x: scatter(reduce(x.bfloat16().float())),
    "cast between": lambda x: scatter(reduce(x.bfloat16()).float()),
    "scaled": lambda x: scatter(reduce(x) / 2),
    "columns": lambda x: scatter(reduce(x), 1),
    "transposed": lambda x: scatter(reduce(x).t()),
    "of a transposed tensor": lambda x: scatter(reduce(x.t()).view(-1)),
    "rows": lambda x: scatter(reduce(x)[:4]),
    "read as a shard": lambda x: (y := scatter(reduce(x)), y.relu()),
    "outer is inside": lambda x: scatter(reduce(x, group="inner"), group="outer"),
}
STAYS: dict[str, tuple[Function, str]] = {
    "another reader": (read_twice, "reads wait_tensor as well"),
    "another reader of a view": (view_read_twice, "reads view as well"),
    "sum of an average": (lambda x: scatter(reduce(x, "avg")), "reduce with avg and sum"),
    "average of a sum": (lambda x: scatter(reduce(x), op="avg"), "reduce with sum and avg"),
    "maximum": (lambda x: scatter(reduce(x, "max")), "reduce with max and sum"),
    "maxima": (lambda x: scatter(reduce(x, "max"), op="max"), "reduce with max and max"),
    "one group": (lambda x: scatter(reduce(x, group="inner")), "not two dims"),
    "diagonal": (lambda x: scatter(reduce(x, group="diagonal")), "not two dims"),
    "uneven": (padded, "pads uneven shards"),
    "narrowed": (lambda x: scatter(reduce(x).bfloat16()), "narrows the sum to torch.bfloat16"),
    "arithmetic": (lambda x: scatter(reduce(x).relu()), ""),
    "added": (lambda x: scatter(reduce(x) + 1), ""),
    "two reductions": (lambda x: scatter(torch.cat([reduce(x[:4]), reduce(x[4:])])), ""),
    "scattered first": (lambda x: reduce(scatter(x)), ""),
}


def run(rank: int, world: int, names: list[str], moved: bool, overlap: str = "force") -> list[str]:
    """Return what is wrong with results, with the number of moved all_reduces, or with what decisions say."""
    make_groups()
    wrong = []
    for name in names:
        function, why = (MOVED[name], "") if moved else STAYS[name]
        x = torch.randint(-3, 4, (8, 6), generator=torch.Generator().manual_seed(rank)).float()  # sums are exact
        truth, mark = function(x), HISTORY.mark()
        torch._dynamo.reset()
        with uncached():
            result = torch.compile(function, backend="ub_overlap", options={**OPTIONS, "overlap": overlap})(x)
        decisions = [d for plan in HISTORY.since(mark) for d in plan.decisions]
        pairs = zip(*[o if isinstance(o, tuple) else (o,) for o in (truth, result)], strict=True)
        if not all(torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride() for a, b in pairs):
            wrong.append(f"{name}: results {truth} {result}")
        kinds, changed = [d.kind.value for d in decisions], [d for d in decisions if d.reordered]
        details = "; ".join(d.detail for d in decisions)
        if moved:
            (d,) = changed or [None]
            if d is None or kinds != ["reduce_scatter", "all_reduce"] or d is not decisions[1] or "instead of" not in d.detail:
                wrong.append(f"{name}: {kinds} {details}")
            elif d.bytes is not None and name == "plain" and (d.bytes, d.saved_bytes) != (4 * 6 * 4, 4 * 6 * 4):
                wrong.append(f"{name}: {d.bytes} bytes, {d.saved_bytes} saved")
        elif changed or why not in details or ("not moved" in details) != bool(why):
            wrong.append(f"{name}: {kinds} {details}")
    return wrong


def test_moved(pool4: RankPool) -> None:
    assert pool4.run(run, list(MOVED), True) == [[]] * 4


def test_moved_without_overlap(pool4: RankPool) -> None:
    """The option does not depend on which sites are overlapped: with "off", overrides may select them."""
    assert pool4.run(run, ["plain"], True, "off") == [[]] * 4


def test_look_alikes_stay(pool4: RankPool) -> None:
    assert pool4.run(run, list(STAYS), False) == [[]] * 4


def test_dims_of_meshes() -> None:
    """Every group of a row-major mesh of up to three dims is recognized, from each of its ranks; the dims are orthogonal."""
    for sizes in ((2, 2), (4, 2), (2, 3), (2, 2, 2), (3, 2, 4)):
        mesh = torch.arange(torch.Size(sizes).numel()).view(sizes)
        dims = []
        for i, size in enumerate(sizes):
            groups = mesh.movedim(i, -1).reshape(-1, size).tolist()
            found = {mesh_dim(group, rank) for group in groups for rank in group}
            assert found == {MeshDim(mesh.stride(i), size)}
            dims += found
        assert all(a.is_orthogonal_to(b) for a in dims for b in dims if a is not b)
        assert not any(a.is_orthogonal_to(a) for a in dims)


@pytest.mark.parametrize("ranks", [[0], [0, 2, 3], [0, 3], [1, 2], [2, 0]])
def test_other_groups(ranks: list[int]) -> None:
    """Look-alikes: one rank, uneven distances, the diagonals of a 2 x 2 mesh, another order."""
    dims = {mesh_dim(ranks, rank) for rank in ranks}
    assert None in dims or not any(d.is_orthogonal_to(MeshDim(1, 2)) for d in dims if d is not None)


# --- a model ------------------------------------------------------------------------------------------------------------


def checked(pool: RankPool, mixed: bool, options: dict[str, Any]) -> list[Comparison]:
    outcomes: list[Comparison] = pool.run(compare, "tests.models.fsdp", {"mixed": mixed, "replicas": 2}, options)
    for outcome in outcomes:
        outcome.check()
    return outcomes


@pytest.mark.parametrize("mixed", [False, True])
def test_hybrid_sharding(pool4: RankPool, mixed: bool) -> None:
    """Gradients are as exact as eager's; each reduce_scatter is fused with its matmul, each all_reduce split."""
    overrides = [{"strategy": "split", "kind": "all_reduce"}]
    for outcome in checked(pool4, mixed, {**OPTIONS, "overrides": overrides}):
        backward = [d for d in outcome.decisions if d["phase"] == "backward"]
        kinds = ["matmul_reduce_scatter", "all_reduce"] * 2
        assert [(d["kind"], d["strategy"].split(":")[0]) for d in backward] == [
            (kind, "split" if kind == "all_reduce" else "pipelined") for kind in kinds
        ]
        size = 2 if mixed else 4
        assert [d["bytes"] for d in backward] == [96 * 64 // 2 * size, 96 * 64 // 2 * 4] * 2
        assert {d["reordered"] for d in backward if d["kind"] == "all_reduce"} == {"2 ranks 1 apart, then 2 ranks 2 apart"}
        assert all(d["bytes_copied"] == d["bytes"] * d["calls"] for d in backward)


def test_as_traced_by_default(pool4: RankPool) -> None:
    for outcome in checked(pool4, True, FORCE):
        backward = [d for d in outcome.decisions if d["phase"] == "backward"]
        assert [d["kind"] for d in backward] == ["matmul_all_reduce", "reduce_scatter"] * 2
        assert not any(d["reordered"] for d in backward)


def shown(rank: int, world: int) -> list[str]:
    """Return the edits of the joint graph."""
    mark = HISTORY.mark()
    compare(rank, world, "tests.models.fsdp", {"replicas": 2}, OPTIONS)
    report = Report(HISTORY.since(mark))
    assert "less than traced" in report.summary()
    return [row["edit"] for row in report.diff[0].rows()]


def test_the_diff_shows_it(pool4: RankPool) -> None:
    edit = "all_reduce + 2 waits + reduce_scatter -> reduce_scatter + 2 waits + all_reduce"
    assert pool4.run(shown) == [[edit] * 2] * 4


# --- decisions for large gradients --------------------------------------------------------------------------------------


def hybrid_backward(layers: int = 3) -> Graph:
    """Return gradients of weights 8B models have, and of the activations: bf16 products, reduced in fp32 over two groups."""
    d = Dag(2)
    gradient, x = d.input("gradient", 8192, 4096), d.input("x", 8192, 4096)
    weights = [d.input(f"w{i}", 4096, 4096) for i in range(layers)]
    reduced = []
    for weight in weights:
        wide = d.call(cast, d.mm(d.t(gradient), x), torch.float32)
        total = d.call(c10d.wait_tensor.default, d.call(c10d.all_reduce.default, wide, "sum", "outer"))
        reduced.append(d.scatter(total))
        gradient = d.mm(gradient, weight)
    return d.output(gradient, *reduced)


def test_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On H200s the all_reduce of a shard finishes late, behind other layers, and the reduce_scatter is overlapped too."""
    monkeypatch.setattr(compat, "group_size", lambda name: 2)  # the graph is not run
    monkeypatch.setattr(compat, "group_ranks", lambda name: {"outer": [0, 2], "g": [0, 1]}[name])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    graph = hybrid_backward()
    assert scatter_first(graph) == 3
    graph.lint()
    plan = decide(graph, Options(profile="h200", min_bytes=0), "backward", lambda *_: None).plan
    scatters, reduces = plan.decisions[::2], plan.decisions[1::2]
    assert [d.kind.value for d in reduces] == ["all_reduce"] * 3 and all(d.overlapped for d in scatters)
    assert [str(d.strategy).partition(":")[0] for d in reduces[:-1]] == ["split", "split"]
    assert all(d.bytes == d.saved_bytes == 4096 * 4096 // 2 * 4 for d in reduces)
    assert Plan.from_json(plan.to_json()) == plan
    other = decide(hybrid_backward(), Options(profile="h200", min_bytes=0), "backward", lambda *_: None).plan
    assert other.shared_digest != plan.shared_digest


def test_the_mesh_is_part_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other meshes have other plans: strides and sizes prove that the groups are orthogonal only together."""
    monkeypatch.setattr(compat, "group_size", lambda name: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    digests = set()
    for stride in (2, 4):
        monkeypatch.setattr(compat, "group_ranks", lambda name, s=stride: {"outer": [0, s], "g": [0, 1]}[name])
        graph = hybrid_backward(1)
        assert scatter_first(graph) == 1
        assert any(joint_decision(n).reordered == f"2 ranks 1 apart, then 2 ranks {stride} apart" for n in graph.nodes)
        digests.add(decide(graph, Options(overlap="force"), "backward", lambda *_: None).plan.shared_digest)
    assert len(digests) == 2


@pytest.mark.parametrize("is_on", [True, False])
def test_the_mesh_is_part_of_cache_keys(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    """Another job may give the same names to groups of other ranks. The ranks of one mesh share their keys."""
    monkeypatch.setattr(compat, "groups", lambda: ["1:gloo:2", "2:gloo:2"])
    monkeypatch.setattr(compat, "process_groups", lambda: [SimpleNamespace(group_name=name) for name in "12"])
    keys = []
    for rank, groups in ((0, [[0, 1], [0, 2]]), (3, [[2, 3], [1, 3]]), (0, [[0, 1], [0, 3]])):
        monkeypatch.setattr(compat, "global_ranks", lambda group, g=groups: g[int(group.group_name) - 1])
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        keys.append(JointPass(Options(scatter_first=is_on)).uuid())
    assert keys[0] == keys[1] and (keys[0] != keys[2]) == is_on
