"""Plans that agree in what ranks share and differ in the rest: each is kept, reported and counted by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import ub_overlap
from tests.compiler.rank_compile import FORCE, FUSED, INDUCTOR, plans_of, world_name
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from tests.models.compare import uncached
from ub_overlap.compiler import passes
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.reports import cached_graphs, report
from ub_overlap.compiler.reports.history import HISTORY, History
from ub_overlap.compiler.reports.report import Report
from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import PlanMismatchError
from ub_overlap.runtime.stats import site_stats

ROWS, INNER = 8, 16


def gather(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, world_name()) @ w


def gather_again(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, world_name()) @ w


def gather_with_one_op_more(x: Tensor, w: Tensor) -> Tensor:
    return (funcol.all_gather_tensor(x, 0, world_name()) @ w).relu()


def largest(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "max", world_name())


def of_input(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", world_name()) @ w


def four_graphs(rank: int, world: int) -> tuple[Report, list[Any], list[bool]]:
    x, made = torch.ones(ROWS, INNER), []
    for function, columns in ((gather, 16), (gather_again, 96), (largest, 16), (of_input, 16)):
        made += plans_of(function, (x, torch.ones(INNER, columns)), FUSED)
    return Report(made), [HISTORY.find(p.digest) for p in made], [plan_store.path_of(p.digest).is_file() for p in made]


@pytest.mark.tier("test")
def test_graphs_do_not_replace_each_other(fake2: FakeRanks) -> None:
    """They differ in columns of a weight, or in the reason for which they are left alone."""
    ((report, found, stored),) = fake2.run(four_graphs)
    assert len(report.plans) == 4 and found == report.plans and stored == [True] * 4
    assert len({p.shared_digest for p in report.plans}) == 2
    assert [row["shape"] for row in report.rows()[:2]] == ["[16, 16] @ [16, 16]", "[16, 16] @ [16, 96]"]
    assert [d.reason for d in report.decisions[2:]] == [Reason.REDUCE_OP_UNSUPPORTED, Reason.NO_MATMUL]


def run_own_columns(rank: int, world: int, options: dict[str, Any]) -> tuple[list[float], list[str], list[Any]]:
    """Run two graphs, whose weights have other columns on each rank; the second also has an op more on rank 1.

    Return the differences from eager, the shared digests, and [calls, file is there] by plan.
    """
    second = gather_with_one_op_more if rank else gather_again
    graphs: list[tuple[Callable[..., Tensor], int, int]] = [(gather, 16 + 8 * rank, 1), (second, 96 - 8 * rank, 3)]
    mark, before, x, differences = HISTORY.mark(), site_stats(), torch.randn(ROWS, INNER), []
    with uncached():
        for function, columns, calls in graphs:
            w = torch.randn(INNER, columns)
            expected = function(x, w)
            compiled = torch.compile(function, backend="ub_overlap", options=options)
            differences += [float((compiled(x, w) - expected).abs().max()) for _ in range(calls)]
    plans = HISTORY.since(mark)
    assert {p.digest for p in plans} <= {p.digest for p in ub_overlap.reports().plans}
    counted = [(d.calls, plan_store.path_of(d.plan).is_file()) for d in Report(plans, since=before).decisions]
    return differences, [p.shared_digest for p in plans], counted


@pytest.mark.parametrize("options", [FORCE, in_full(INDUCTOR)], ids=["aot_eager", "inductor"])
def test_ranks_agree_on_plans_that_differ_in_their_own_parts(pool2: RankPool, options: dict[str, Any]) -> None:
    """All four graphs share one digest; each rank reports its two, with calls of their own."""
    results = pool2.run(run_own_columns, options)
    for differences, digests, counted in results:
        assert max(differences) < 1e-5 and len(differences) == 4
        assert len(digests) == 2 and len(set(digests)) == 1 and digests == results[0][1]
        assert counted == [(1, True), (3, True)]


def run_one_gather_more(rank: int, world: int) -> str:
    group = str(dist.new_group().group_name)  # its own: an error breaks it

    def gather(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) @ w

    def gather_twice(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, w) + gather(x.relu(), w)

    compiled = torch.compile(gather_twice if rank else gather, backend="ub_overlap", options=FORCE)
    with uncached(), pytest.raises(PlanMismatchError) as raised:
        compiled(torch.ones(ROWS, INNER), torch.ones(INNER, 16))
    return str(raised.value)


def test_one_collective_more_is_another_plan(pool2: RankPool) -> None:
    """The error names sites by what ranks share, so both ranks can find them."""
    texts = pool2.run(run_one_gather_more)
    assert all("compiled another plan" in text and "forward.1" in text for text in texts)


@pytest.mark.tier("test")
def test_a_graph_that_is_left_alone_is_reported_from_a_warm_cache(
    fake2: FakeRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a later process: the pass does not run, and no op of the cached code names the plan."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path / "ours"))
    summaries, created = [], []
    with fake2.group(), torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=True):
        for _ in range(2):
            torch.compiler.reset()
            history = History()
            for module in (passes, cached_graphs, report):
                monkeypatch.setattr(module, "HISTORY", history)
            x, w = torch.ones(ROWS, INNER), torch.ones(INNER, 16)
            torch.compile(of_input, backend="ub_overlap", options={**INDUCTOR, "split": "off"})(x, w)
            summaries.append(ub_overlap.reports().summary())
            created.append(len(history.since(0)))
    assert created == [1, 0], "the second graph is compiled, too"
    assert all("0 of 1 collectives overlapped; left alone: no_matmul 1" in summary for summary in summaries)


def test_keys_of_cached_graphs() -> None:
    """What may change a plan changes the key; nothing is stored where nothing is cached."""
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    x = torch.ones(4, 2)
    keys = [
        cached_graphs.key_of(graph, [value], "passes") for value in (x, x.double(), x.t(), x[:2], x.clone().requires_grad_())
    ]
    with torch.no_grad():
        keys.append(cached_graphs.key_of(graph, [x], "passes"))
    keys += [
        cached_graphs.key_of(graph, [x], "others"),
        cached_graphs.key_of(torch.fx.symbolic_trace(lambda x: x), [x], "passes"),
    ]
    assert len(set(keys)) == len(keys) and cached_graphs.key_of(graph, [x], "passes") == keys[0]
    assert cached_graphs.key_of(graph, [x], None) == ""


def test_damaged_keys_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    for content in ("{", "[]", "7", '{"version": 1}', '{"version": 1, "plans": {"forward": "../x"}}', '{"version": 2}'):
        path = cached_graphs.path_of("a" * 32)
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        cached_graphs.remember_cached("a" * 32, "auto")


def test_a_compilation_goes_on_without_msgspec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the package was installed without its dependencies, a graph out of the cache is left out of reports."""
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    plan = Plan("forward", ())
    plan_store.save(plan.digest, plan.to_json())
    cached_graphs.note("b" * 32, plan)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    cached_graphs.remember_cached("b" * 32, "auto")
    assert "reports lack a graph out of torch's compile cache" in caplog.text
