"""Groups across hosts in compiled graphs: split collectives over c10d, and fused sites only within a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.compiler.rank_compile import build, plans_of
from tests.compiler.test_split import SPLIT, ZERO3, automatic, calls, compare_name, hidden_matmuls
from tests.harness.ranks import RankPool
from tests.models.compare import compare, uncached
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import settings
from ub_overlap.runtime.session.transport import transport_signature
from ub_overlap.runtime.stats import site_stats


@pytest.fixture(scope="module")
def hosts2() -> Iterator[RankPool]:
    """Two ranks on two declared hosts."""
    with RankPool(2, env={"UB_OVERLAP_HOSTS": "1"}) as pool:
        yield pool


@pytest.fixture(scope="module")
def hosts4() -> Iterator[RankPool]:
    """Four ranks on two declared hosts."""
    with RankPool(4, env={"UB_OVERLAP_HOSTS": "2"}) as pool:
        yield pool


def compared(rank: int, world: int, variant: dict[str, Any], options: dict[str, Any]) -> tuple[Any, set[str]]:
    """Return the comparison of a case, and the transports that its sites ran on."""
    before = set(site_stats())
    found = compare(rank, world, ZERO3, variant, options)
    return found, {one.transport for site, one in site_stats().items() if site not in before}


@pytest.mark.parametrize(("mixed", "budget"), [(False, None), (True, 0)])
def test_zero3(hosts2: RankPool, mixed: bool, budget: float | None) -> None:
    """Outputs and gradients are those of the unfused graph. Every collective is split and runs over c10d."""
    options = {**SPLIT, "inner": "aot_eager", "memory_budget": budget}
    for outcome, transports in hosts2.run(compared, {"mixed": mixed}, options, timeout=120):
        outcome.check()
        assert len(outcome.decisions) == (12 if budget is None else 18)
        assert {(d["strategy"], d["window"]["transport"], d["work"]["hosts"]) for d in outcome.decisions} == {
            ("split", "c10d", 2)
        }
        assert all("over c10d, starts as number" in d["detail"] for d in outcome.decisions)
        assert transports == {"c10d"}


def test_all_to_all(hosts2: RankPool) -> None:
    """Exchanges of experts across hosts run over c10d."""
    options = {"inner": "aot_eager", "overrides": [{"kind": "all_to_all", "strategy": "split"}]}
    for outcome in hosts2.run("tests.models.compare:compare", "tests.models.moe", {}, options, timeout=120):
        outcome.check(3.0)
        split = [d["window"]["transport"] for d in outcome.decisions if d["strategy"] == "split"]
        assert split == ["c10d"] * 4


@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_gradients_are_sent_as_traced(hosts2: RankPool, reduce_dtype: str | None) -> None:
    """SimpleFSDP's mixed precision: c10d sums in what it sends, so the gradient is cast to fp32 first."""
    options = {**SPLIT, "inner": "aot_eager", "reduce_dtype": reduce_dtype}
    for outcome in hosts2.run(compare_name, "tests.models.fsdp", {"mixed": True}, options, timeout=120):
        outcome.check()
        found = {(d["kind"], d["strategy"], d["dtype"], d["sent_dtype"], d["saved_bytes"]) for d in outcome.decisions}
        assert found == {("all_gather", "split", "bfloat16", "", 0), ("reduce_scatter", "split", "float32", "", 0)}


def test_four_ranks_of_two_hosts(hosts4: RankPool) -> None:
    options = {**SPLIT, "inner": "aot_eager"}
    for outcome in hosts4.run(compare_name, ZERO3, {"layers": 1}, options, timeout=120):
        outcome.check()
        assert {(d["strategy"], d["window"]["transport"]) for d in outcome.decisions} == {("split", "c10d")}


def test_generated_code(hosts2: RankPool) -> None:
    """With Inductor the order is the plan's: starts in front of the matmuls that hide them."""
    (programs, _), other = hosts2.run(calls, SPLIT, timeout=240)
    assert programs == other[0]
    hidden = [n for program in programs for n in hidden_matmuls(program).values()]
    assert len(hidden) == 16 and sum(n > 0 for n in hidden) >= 12, hidden


@pytest.mark.parametrize("options", [{"overlap": "force"}, {"overrides": [{"strategy": "pipelined"}]}])
def test_fused_sites_are_refused(hosts2: RankPool, options: dict[str, Any]) -> None:
    """The collectives are left alone, with the reason, and the results are those of the unfused graph."""
    for outcome in hosts2.run(compare_name, ZERO3, {"layers": 1}, {**options, "inner": "aot_eager"}, timeout=120):
        outcome.check()
        assert len(outcome.decisions) == 4
        for d in outcome.decisions:
            assert (d["strategy"], d["reason"]) == ("none", Reason.NO_TRANSPORT.value), d
            assert "its ranks are on 2 hosts" in d["detail"]


def test_auto_takes_parameters_only(hosts2: RankPool) -> None:
    """As within a host: gathers of parameters and reductions of gradients, if the network lets them hide."""
    for found, others in hosts2.run(automatic, timeout=200):
        assert found["forward all_gather split"] > 0 and found["backward reduce_scatter split"] > 0, found
        assert {kind.split()[-1] for kind in found} == {"split", "none"}, found
        assert not any("all_gather split" in kind for kind in others), others


def test_small_collectives_are_split_too(hosts2: RankPool, pool2: RankPool) -> None:
    """Their latency is worth hiding. Look-alike: within a host they are below the threshold."""
    for found in hosts2.run(small, timeout=120):
        assert found["split"] > 0 and found["below_threshold"] == 0, found
    for found in pool2.run(small, timeout=120):
        assert found["split"] == 0 and found["below_threshold"] > 0, found


def small(rank: int, world: int) -> Counter[str]:
    case = build(rank, world, ZERO3, {"layers": 3, "width": 512, "mixed": True})
    plans = plans_of(case.module, case.inputs, {"profile": "h200", "inner": "aot_eager"})
    return Counter(d.reason.value if d.reason else d.strategy.mode.value for plan in plans for d in plan.decisions)


def test_both_kinds_of_groups_in_one_graph(hosts4: RankPool) -> None:
    """A matmul with a weight gathered across hosts and an activation gathered within: each group has its own transport."""
    for error, decisions, transports in hosts4.run(mixed_groups, timeout=120):
        assert error < 1e-5
        assert decisions == {"forward.0": "split", "forward.1": "pipelined"}
        assert transports == {"c10d", "shared memory"}


def mixed_groups(rank: int, world: int) -> tuple[float, dict[str, str], set[str]]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    across, within = mesh.get_group("data"), mesh.get_group("tensor")

    def step(x: Tensor, weight: Tensor) -> Tensor:
        whole = funcol.all_gather_tensor(weight, 0, across)
        return torch.tanh(funcol.all_gather_tensor(x, 0, within) @ whole.t())

    torch.manual_seed(rank)
    inputs = torch.randn(16, 64), torch.randn(32, 64)
    options = {"inner": "aot_eager", "overrides": {"forward.0": "split", "forward.1": "pipelined"}}
    compiled = torch.compile(step, backend="ub_overlap", options=options)
    before, mark = set(site_stats()), HISTORY.mark()
    with torch.no_grad(), uncached():
        error = float((compiled(*inputs) - step(*inputs)).abs().max())
    decisions = {d.id: d.strategy.mode.value for p in HISTORY.since(mark) for d in p.decisions}
    return error, decisions, {one.transport for site, one in site_stats().items() if site not in before}


def test_hybrid_sharding(hosts4: RankPool) -> None:
    """With scatter_first the reduce_scatter runs within a host and the all_reduce of one shard across hosts, both split."""
    for error, found in hosts4.run(hybrid, timeout=120):
        assert error < 1e-5
        assert found == [("reduce_scatter", "split", "", 1), ("all_reduce", "split", "c10d", 2)]


def hybrid(rank: int, world: int) -> tuple[float, list[tuple[str, str, str, int]]]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outer, inner = mesh.get_group("outer"), mesh.get_group("inner")

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = funcol.all_reduce(x.t() @ y, "sum", outer)
        return funcol.reduce_scatter_tensor(total, "sum", 0, inner), torch.tanh(y).t() @ x

    torch.manual_seed(rank)
    inputs = torch.randn(16, 64), torch.randn(16, 32)
    compiled = torch.compile(step, backend="ub_overlap", options={**SPLIT, "inner": "aot_eager", "scatter_first": True})
    mark = HISTORY.mark()
    with torch.no_grad(), uncached():
        error = max(float((a - b).abs().max()) for a, b in zip(compiled(*inputs), step(*inputs), strict=True))
    found = [d for p in HISTORY.since(mark) for d in p.decisions]
    assert all(d.window is not None and d.work is not None for d in found), found
    return error, [(d.kind.value, str(d.strategy), d.window.transport, d.work.hosts) for d in found]  # type: ignore[union-attr]


def test_hosts_are_part_of_cache_keys(hosts2: RankPool) -> None:
    for declared, one in hosts2.run(signatures, timeout=60):
        assert declared != one


def signatures(rank: int, world: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = transport_signature()
    before = settings.current().hosts
    try:
        settings.configure(hosts="")
        return found, transport_signature()
    finally:
        settings.configure(hosts=before)
