"""Dispatch tables of ops: text form, the strategy that a call picks, and equal picks on all ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.compiler.rank_compile import plans_of, world_name
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from tests.runtime.oracle import data, far
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.strategy import NONE, DispatchTable, Mode, Strategy, parse
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.reports.report import Report, reports
from ub_overlap.runtime import autotune, ops, timed_rounds
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.runtime.stats import SiteStats, site_stats

OPS = torch.ops.ub_overlap
AUTO: dict[str, Any] = {"overlap": "auto", "inner": "aot_eager", "min_bytes": 0, "split": "off", "profile": "h200"}


@pytest.mark.parametrize(
    "text",
    [
        "8=none;*=pipelined",
        "8=none;64=pipelined:chunks=1;*=pipelined|none",
        "pipelined|none",
        "none|bulk",
        "16=bulk;*=none|bulk",
        "8=none;64=direct;*=pipelined|direct",
        "direct|pipelined:stripes=2",
        "8=pipelined:copies=engine;*=pipelined|pipelined:chunks=4:copies=engine",
    ],
)
def test_text(text: str) -> None:
    found = parse(text)
    assert str(found) == text and isinstance(found, DispatchTable) and Strategy.is_forceable(text)
    assert found.mode in ((Mode.BULK,) if "bulk" in text else (Mode.PIPELINED, Mode.DIRECT))
    assert found.direct is ("direct" in text)


def test_a_table_is_looked_up_by_rows() -> None:
    found = parse("8=none;64=pipelined:chunks=1;*=pipelined")
    picked = {rows: str(found.at(rows)) for rows in (0, 8, 9, 64, 65, 1 << 30)}
    assert picked == {
        0: "none", 8: "none", 9: "pipelined:chunks=1", 64: "pipelined:chunks=1", 65: "pipelined", 1 << 30: "pipelined",
    }  # fmt: skip
    assert parse("8=none;*=none") == NONE and str(parse("8=none;64=none;*=bulk")) == "64=none;*=bulk"


@pytest.mark.parametrize(
    "text",
    ["8=none", "*=none;8=bulk", "8=none;8=bulk;*=none", "9=none;8=bulk;*=none", "x=none;*=bulk", "none|none", "none|", ";",
     "0=none;*=bulk", "8=pipelined;*=bulk", "direct|bulk",
     "none;bulk", "pipelined:", "pipelined:copies=kernel", "bulk:copies=engine", "pipelined:stripes=2:copies=engine"],
)  # fmt: skip
def test_bad_text(text: str) -> None:
    assert not Strategy.is_forceable(text)
    with pytest.raises(ValueError, match="expected"):
        parse(text)


def calls(rank: int, world: int) -> tuple[list[str], dict[str, dict[str, int]], dict[str, str], str]:
    """Check every op with a table across bucket limits against fp64, then text that C++ rejects."""
    name, bad = world_name(), []
    table = "8=none;16=pipelined:chunks=1;*=pipelined"

    def check(what: str, out: Tensor, want: Tensor) -> None:
        bad.extend(far(what, out, want, 16))

    for rows in (4, 5, 8, 9, 10, 4):  # rows of a shard; the gathered tensor has twice as many
        shards = [data(rows, 6, seed=r) for r in range(world)]
        whole, w = torch.cat(shards).double(), data(6, 3, seed=9)
        kept, (out,) = OPS.all_gather_matmul(
            shards[rank], [w], [False], [False], 1, False, True, [], [], table, name, "/choice.gather"
        )
        check("gather", out, whole @ w.double())
        check("gathered", kept, whole)
        lhs, rhs = [data(rows * world, 5, seed=r + 20) for r in range(world)], data(5, 3, seed=8)
        total = sum(a.double() @ rhs.double() for a in lhs)
        args = ([lhs[rank]], [rhs], None)
        out, _, _ = OPS.matmul_reduce_scatter(
            *args, 1, False, "sum", torch.float32, False, "plain", [], [], table, name, "/choice.scatter"
        )
        check("scatter", out, total[rank * rows : (rank + 1) * rows])
        out, _, _ = OPS.matmul_all_reduce(*args, "avg", torch.float32, False, [], [], table, name, "/choice.reduce")
        check("reduce", out, total / world)
        bulk = table.replace("pipelined", "bulk")
        shard, site = shards[rank], "/choice.bulk"
        out, (product,) = OPS.bulk(shard, [lhs[rank]], [rhs], "all_gather", "sum", shard.dtype, bulk, name, site)
        check("bulk", out, whole)
        check("product", product, lhs[rank].double() @ rhs.double())
    stats = {site: s for site, s in site_stats().items() if site.startswith("/choice.")}
    try:
        OPS.all_gather_matmul(shards[rank], [w], [False], [False], 1, False, False, [], [], "8=none;bulk", name, "/bad")
        said = ""
    except OptionError as error:
        said = str(error)
    return bad, {k: dict(s.strategies) for k, s in stats.items()}, {k: s.reason for k, s in stats.items()}, said


def test_ops_pick_by_rows(pool2: RankPool) -> None:
    for bad, strategies, reasons, said in pool2.run(calls):
        assert bad == []
        counts = {"none": 2, "pipelined:chunks=1": 2, "pipelined": 2}
        assert strategies.pop("/choice.bulk") == {k.replace("pipelined", "bulk"): n for k, n in counts.items()}
        assert set(strategies) == {"/choice.gather", "/choice.scatter", "/choice.reduce"}
        assert all(found == counts for found in strategies.values())
        assert set(reasons.values()) == {"none by size"}
        assert "8=none;bulk" in said and "expected" in said


def layer(name: Any) -> Any:
    def run(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = funcol.all_gather_tensor(x, 0, name) @ w1
        return funcol.reduce_scatter_tensor(torch.relu(h) @ w2, "sum", 0, name)

    return run


def weights() -> tuple[Tensor, Tensor]:
    return tuple(data(512, 512, seed=s).to(torch.bfloat16) / 20 for s in (1, 2))  # type: ignore[return-value]


def sizes(rank: int, world: int) -> tuple[str, list[tuple[str, dict[str, int], list[str]]], float]:
    """Run one graph at many sizes.

    Return the plan, the actual and expected strategies of each site, and the largest error.
    """
    run, (w1, w2), mark, worst = layer(world_name()), weights(), HISTORY.mark(), 0.0
    ran = (64, 900, 2048, 64)
    with torch.no_grad(), uncached():
        compiled = torch.compile(run, backend="ub_overlap", options=AUTO)
        for rows in ran:
            x = data(rows, 512, seed=rank).to(torch.bfloat16)
            torch._dynamo.mark_dynamic(x, 0, min=16, max=65536)
            worst = max(worst, (compiled(x, w1, w2).float() - run(x, w1, w2).float()).abs().max().item())
    (plan,) = HISTORY.since(mark)
    stats = site_stats()
    rows_ = [
        (
            str(d.strategy),
            dict(stats[str(SiteId(plan.digest, d.id))].strategies),
            [str(d.strategy.at(rows * world)) for rows in ran],
        )
        for d in plan.decisions
    ]
    return plan.to_json(), rows_, worst


@pytest.mark.tier("full")
def test_one_graph_for_all_sizes(pool2: RankPool) -> None:
    """Ranks make byte-equal plans, although their hash seeds differ (tests/harness/processes.py)."""
    found = pool2.run(sizes)
    assert found[0][0] == found[1][0], "the ranks' plans differ"
    plan = Plan.from_json(found[0][0])
    assert plan.to_json() == found[0][0] and Plan.from_json(plan.to_json()) == plan
    for _, sites, worst in found:
        assert worst < 0.1
        for text, strategies, expected in sites:
            table = parse(text)
            assert isinstance(table, DispatchTable) and table.at(32) == NONE and table.at(131072).mode is Mode.PIPELINED
            assert strategies == {name: expected.count(name) for name in expected}
        assert len({tuple(s) for _, s, _ in sites}) > 1, "one bucket alone was tried"


def plan_dynamic(rank: int, world: int, options: dict[str, Any], rows: int) -> list[str]:
    x, (w1, w2) = data(rows, 512, seed=rank).to(torch.bfloat16), weights()
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        return [p.to_json() for p in plans_of(layer(world_name()), (x, w1, w2), options)]


@pytest.mark.tier("full")
def test_floor_and_forced_tables(fake2: FakeRanks) -> None:
    """min_bytes becomes a limit in rows, and an overridden table is used at any traced size."""
    tables = []
    for traced in (64, 4096):
        ((text,),) = fake2.run(plan_dynamic, {**AUTO, "min_bytes": 1 << 24}, traced)
        tables.append([str(d.strategy) for d in Plan.from_json(text).decisions])
    assert tables[0] == tables[1]
    for text in tables[0]:  # a rank sends rows / 2 * 512 * 2 bytes
        table = parse(text)
        assert (
            isinstance(table, DispatchTable) and table.buckets[0].limit is not None and table.buckets[0].limit >= (1 << 15) - 1
        )
        assert table.at((1 << 15) - 1) == NONE
    forced = {"forward.0": "100=none;*=pipelined:chunks=4", "forward.1": "none|pipelined:stripes=2"}
    ((text,),) = fake2.run(plan_dynamic, {**AUTO, "overrides": forced}, 64)
    assert {d.id: str(d.strategy) for d in Plan.from_json(text).decisions} == forced
    again = fake2.run(plan_dynamic, {**AUTO, "overrides": json.loads(text)}, 64)[0][0]
    assert Plan.from_json(again).shared_digest == Plan.from_json(text).shared_digest  # the own part has who forced it


def twice(name: Any) -> Any:
    """Return a function with two equal sites and a different one."""

    def run(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        a, b = (funcol.all_gather_tensor(y, 0, name) @ w1 for y in (x, x + 1))
        return funcol.reduce_scatter_tensor((a + b) @ w2, "sum", 0, name)

    return run


def tune(rank: int, world: int) -> list[dict[str, Any]]:
    """Autotune the same layer on three groups.

    The first is measured. The second has results on disk only, like a new process. In the third, one rank lost its results.
    """
    found = []
    options = {**AUTO, "profile": "cpu", "autotune": True}
    (w1, w2), x = weights(), data(256, 512, seed=rank).to(torch.bfloat16)
    for life in range(3):
        name = dist.new_group(list(range(world))).group_name
        mark, before = HISTORY.mark(), site_stats()
        if life:
            autotune.clear_results()
        if life == 2 and rank == 1:  # one rank without results makes all ranks measure
            autotune._results.files[autotune.path_of(found[0]["digest"])] = {}
        with torch.no_grad(), uncached():
            compiled = torch.compile(twice(name), backend="ub_overlap", options=options)
            worst = max((compiled(x, w1, w2).float() - twice(name)(x, w1, w2).float()).abs().max().item() for _ in range(3))
        (plan,) = HISTORY.since(mark)
        now = site_stats()

        def calls_of(site: str, now: dict[str, SiteStats] = now, before: dict[str, SiteStats] = before) -> dict[str, int]:
            was = before[site].strategies if site in before else {}
            return {k: d for k, n in now[site].strategies.items() if (d := n - was.get(k, 0))} if site in now else {}

        ids = [d.id for d in plan.decisions]
        report = Report([plan], before)
        found.append(
            {
                "digest": plan.shared_digest, "worst": worst, "strategies": [str(d.strategy) for d in plan.decisions],
                "timed": [bool(calls_of(f"{SiteId(plan.digest, i)}.tuning")) for i in ids],
                "ran": [calls_of(str(SiteId(plan.digest, i))) for i in ids],
                "picks": [{k: t.to_dict() for k, t in d.tuned} for d in report.decisions],
                "table": report.table(), "json": json.loads(report.to_json()), "all": str(reports()),
            }
        )  # fmt: skip
    return found


@pytest.mark.tier("full")
def test_tuning(pool2: RankPool) -> None:
    """Equal sites are timed once, all ranks pick the same strategy, and picks are stored on disk.

    Timing does not change call counts or results.
    """
    ranks = pool2.run(tune)
    assert ops.load()
    for life, (mine, theirs) in enumerate(zip(*ranks, strict=True)):
        assert mine["picks"] == theirs["picks"] and mine["digest"] == ranks[0][0]["digest"]
        for one in (mine, theirs):
            assert one["worst"] < 0.2
            assert one["timed"] == ([True, False, True] if life != 1 else [False] * 3), life
            for text, ran, picks in zip(one["strategies"], one["ran"], one["picks"], strict=True):
                names = text.split("|")
                assert 2 <= len(names) <= 3 and set(picks) == {"*"}
                us, picked = picks["*"]["us"], picks["*"]["strategy"]
                assert list(us) == names and all(t > 0 for t in us.values())
                best = min(us, key=us.__getitem__)
                assert picked in (best, names[0]) and us[picked] <= us[best] / (1 - timed_rounds.MARGIN) + 1e-3
                # Exactly three calls of the site: the first uses the predicted strategy, the others the picked one.
                assert ran == ({names[0]: 3} if picked == names[0] else {names[0]: 1, picked: 2})
            assert "us measured" in one["table"] and one["json"]["sites"][0]["tuned"]["*"] == one["picks"][0]["*"]
            assert one["picks"][0] == one["picks"][1]
    for mine in ranks[0][1:]:
        assert mine["digest"] == ranks[0][0]["digest"]
    assert ranks[0][0]["picks"] == ranks[0][1]["picks"], "a later process reads what the first one wrote"


def tune_with_a_bias(rank: int, world: int) -> list[bool]:
    """Return whether a site with a bias on rank 0 only was timed: first, then in a group that reads what the first wrote."""
    (w, _), x = weights(), data(512, 512, seed=rank).to(torch.bfloat16)
    bias = torch.ones(w.shape[1], dtype=w.dtype)
    timed = []
    for _ in range(2):
        autotune.clear_results()
        name = dist.new_group(list(range(world))).group_name

        def run(x: Tensor, name: Any = name) -> Tensor:
            return funcol.reduce_scatter_tensor(x @ w + bias if rank == 0 else x @ w, "sum", 0, name)

        mark, before = HISTORY.mark(), site_stats()
        with torch.no_grad(), uncached():
            compiled = torch.compile(run, backend="ub_overlap", options={**AUTO, "profile": "cpu", "autotune": True})
            assert (compiled(x).float() - run(x).float()).abs().max().item() < 0.2
        (plan,) = HISTORY.since(mark)
        tuning = f"{SiteId(plan.digest, plan.decisions[0].id)}.tuning"
        after = site_stats()
        timed.append(tuning in after and (tuning not in before or after[tuning].calls > before[tuning].calls))
    return timed


@pytest.mark.tier("full")
def test_results_of_a_site_with_an_addend_of_one_rank_are_used_again(pool2: RankPool) -> None:
    assert pool2.run(tune_with_a_bias) == [[True, False]] * 2
