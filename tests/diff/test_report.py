"""Tests of snapshots of graphs traced by torch, from the passes to the store, the report and its page."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import ub_overlap
from tests.compiler.rank_compile import FORCE, INDUCTOR, build
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.diff import stored_report
from ub_overlap.compiler.diff.graph_store import STORE, GraphStore
from ub_overlap.compiler.diff.render import html
from ub_overlap.runtime import plan_store, settings

MLP = ("tests.models.megatron", {"gated": True, "dims": 2})
SUMMED = ("tests.models.forms", {"name": "two_reduces"})


@dataclass(frozen=True)
class Told:
    json: str
    titles: list[tuple[str, str, str]]
    sources: list[str]
    on_disk: list[bool]
    warm: int
    page: str


def explain(rank: int, world: int, model: tuple[str, dict[str, Any]], options: dict[str, Any]) -> Told:
    case = build(rank, world, *model)
    with uncached():
        report = ub_overlap.explain(case.module, options)(*case.inputs)
    titles = [(d.a.phase, e.site, e.title) for d in report.diff for e in d.edits]
    sources = [e.source for d in report.diff for e in d.edits]
    on_disk = [plan_store.graphs_path_of(p.digest).is_file() for p in report.plans]
    kept, stored_ = ([s.find(p.digest) for p in report.plans] for s in (STORE, GraphStore()))
    warm = sum(a is not None and b is not None and a.after.nodes == b.after.nodes for a, b in zip(kept, stored_, strict=True))
    page = report.to_html(plan_store.directory() / f"page-{rank}.html").read_text() if rank == 0 else ""
    return Told(report.to_json(), titles, sources, on_disk, warm, page)


@pytest.fixture(scope="module")
def of_mlp(pool2: RankPool) -> dict[str, list[Told]]:
    """Return the results of all ranks for one model, by inner compiler."""
    return {name: pool2.run(explain, MLP, options) for name, options in (("aot_eager", FORCE), ("inductor", INDUCTOR))}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_before_and_after(of_mlp: dict[str, list[Told]], inner: str) -> None:
    one, other = of_mlp[inner]
    assert one.titles == other.titles == [
        ("forward", "forward.0", "all_gather + wait + 2 matmuls -> all_gather_matmul"),
        ("forward", "forward.1", "matmul + reduce_scatter + wait -> matmul_reduce_scatter"),
        ("backward", "backward.0", "all_gather + wait + 2 matmuls -> all_gather_matmul"),
        ("backward", "backward.1", "2 matmuls + add + reduce_scatter + wait -> matmul_reduce_scatter"),
    ]  # fmt: skip
    assert all("megatron.py:" in s for s in one.sources)
    assert one.on_disk == [True, True] and one.warm == 2
    embedded = one.page.partition('id="data">')[2].partition("</script>")[0]
    data = json.loads(embedded)
    assert [g["phase"] for g in data["graphs"]] == ["forward", "backward"] and len(data["sites"]) == 4
    assert set(data["lanes"]) == {f"{s['plan']}/{s['id']}" for s in data["sites"]}


def test_ranks_and_compilers_compared(of_mlp: dict[str, list[Told]], tmp_path: Path) -> None:
    """Ranks have equal graphs; Inductor's and AOTAutograd's graphs differ in views and not in matmuls."""
    (eager, other), inductor = of_mlp["aot_eager"], of_mlp["inductor"][0]
    paths = []
    for name, told in (("eager", eager), ("other", other), ("inductor", inductor)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(told.json)
    reports = [stored_report.read_report(p) for p in paths]
    same = stored_report.compare_reports(reports[0], reports[1], ("rank 0", "rank 1"))
    assert same.same and [d.same for d in same.before] == [True, True]
    differs = stored_report.compare_reports(reports[0], reports[2], ("aot", "inductor"))
    assert not differs.same and not differs.sites
    forward = differs.before[0]
    assert {n.target for e in forward.edits for n in (forward.a.nodes[i] for i in e.removed)} <= {
        "aten.t.default",
        "aten.silu.default",
    }


@pytest.mark.tier("test")
def test_joint(fake2: FakeRanks) -> None:
    """The rewrite all_reduce(a) + all_reduce(b) -> all_reduce(a + b) precedes partitioning and has its own diff."""
    told = fake2.run(explain, SUMMED, FORCE)[0]
    joint = [title for phase, _, title in told.titles if phase == "joint"]
    assert joint == ["2 all_reduces + 2 waits + add -> add + all_reduce + wait"]
    assert [g["name"].split()[0] for g in html.data(json.loads(told.json))["graphs"]][:2] == ["joint", "forward"]


def apart(rank: int, world: int) -> dict[str, Any]:
    """Explain a model in which only rank 1 squares a value, so its second collective feeds no matmul."""
    group: Any = dist.new_group(list(range(world)))  # a separate group, because the error poisons it
    name = group.group_name

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = funcol.all_gather_tensor(x, 0, name) @ w
        g = funcol.all_gather_tensor(h, 0, name)
        if rank == 1:
            g = g * g
        return g @ w.t()

    with torch.no_grad(), uncached():
        try:
            torch.compile(function, backend="ub_overlap", options=FORCE)(torch.randn(8, 64), torch.randn(64, 48))
        except Exception as error:  # noqa: BLE001 (torch may wrap it)
            own = getattr(error, "inner_exception", error)
            return {"type": type(own).__name__, "text": str(own), "diff": getattr(own, "diff", "")}
    return {}


def test_ranks_that_differ_are_told_where(pool2: RankPool) -> None:
    """The error names the first differing node and its source line on both ranks."""
    for rank, found in enumerate(pool2.run(apart)):
        assert found["type"] == "PlanMismatchError"
        said = found["diff"]
        assert said in found["text"] and "the forward graphs differ: 1 edit" in said
        assert "aten.mul.Tensor" in said and "test_report.py:" in said and "g = g * g" in said
        assert ("nothing -> mul" if rank == 0 else "mul -> nothing") in said
        assert f"rank {rank}:" in said and f"rank {1 - rank}:" in said


def explain_without_snapshots(rank: int, world: int, *args: Any) -> Any:
    settings.configure(snapshots=False)
    try:
        return explain(rank, world, *args)
    finally:
        settings.configure(snapshots=True)


@pytest.mark.tier("test")
def test_without_snapshots(fake2: FakeRanks) -> None:
    told = fake2.run(explain_without_snapshots, (MLP[0], {**MLP[1], "local": 20}), FORCE)[0]
    assert told.titles == [] and told.on_disk == [False, False]
    parsed = json.loads(told.json)
    assert parsed["graphs"] == [] and len(parsed["sites"]) == 4
    assert replace(told, json="", page="").warm == 0
