"""Groups across hosts in compiled graphs: split collectives over c10d, and fused sites only within a host."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import ub_overlap
from tests.compiler.rank_compile import build, plans_of
from tests.compiler.test_split import SPLIT, ZERO3, automatic, calls, compare_name, hidden_matmuls
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from tests.models.compare import compare, uncached
from tests.runtime.rank_failures import attempt
from tests.runtime.rank_sessions import reset
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.passes import RewritePass
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import settings
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.session import own_groups
from ub_overlap.runtime.session.transport import transport_signature
from ub_overlap.runtime.stats import site_stats

pytestmark = pytest.mark.tier("test")


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


@pytest.mark.parametrize(("mixed", "budget"), [in_full((False, None)), (True, 0)])
def test_zero3(hosts2: RankPool, mixed: bool, budget: float | None) -> None:
    """Outputs and gradients are those of the unfused graph. Every collective is split and runs over c10d."""
    options = {**SPLIT, "inner": "aot_eager", "memory_budget": budget}
    for outcome, transports in hosts2.run(compared, {"mixed": mixed}, options):
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
    for outcome in hosts2.run("tests.models.compare:compare", "tests.models.moe", {}, options):
        outcome.check(3.0)
        split = [d["window"]["transport"] for d in outcome.decisions if d["strategy"] == "split"]
        assert split == ["c10d"] * 4


@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_gradients_are_sent_as_traced(hosts2: RankPool, reduce_dtype: str | None) -> None:
    """SimpleFSDP's mixed precision: c10d sums in what it sends, so the gradient is cast to fp32 first."""
    options = {**SPLIT, "inner": "aot_eager", "reduce_dtype": reduce_dtype}
    for outcome in hosts2.run(compare_name, "tests.models.fsdp", {"mixed": True}, options):
        outcome.check()
        found = {(d["kind"], d["strategy"], d["dtype"], d["sent_dtype"], d["saved_bytes"]) for d in outcome.decisions}
        assert found == {("all_gather", "split", "bfloat16", "", 0), ("reduce_scatter", "split", "float32", "", 0)}


@pytest.mark.tier("full")
def test_four_ranks_of_two_hosts(hosts4: RankPool) -> None:
    options = {**SPLIT, "inner": "aot_eager", "hierarchical": "off"}
    for outcome in hosts4.run(compare_name, ZERO3, {"layers": 1}, options):
        outcome.check()
        assert {(d["strategy"], d["window"]["transport"]) for d in outcome.decisions} == {("split", "c10d")}
        assert [d["window"]["first_half"] for d in outcome.decisions] == [None] * 4


HIERARCHICAL: dict[str, Any] = {**SPLIT, "inner": "aot_eager", "hierarchical": "force"}


@pytest.mark.parametrize(("mixed", "budget"), [in_full((False, None)), (True, 0)])
def test_hierarchical_zero3(hosts4: RankPool, mixed: bool, budget: float | None) -> None:
    """Gathers run across hosts, then within; reduce_scatters within, then across. Forward and gradients stay as they are."""
    options = {**HIERARCHICAL, "memory_budget": budget}
    for outcome, transports in hosts4.run(compared, {"mixed": mixed}, options):
        outcome.check()
        assert len(outcome.decisions) == (12 if budget is None else 18)
        for d in outcome.decisions:
            second = d["window"]
            assert d["strategy"] == "split" and d["ranks"] == 4 and d["work"]["hosts"] == 2
            found = (second["first_half"]["transport"], second["transport"])
            assert found == (("c10d", "") if d["kind"] == "all_gather" else ("", "c10d"))
            assert second["first_half"]["order"] < second["order"]
            assert "hierarchical: first " in d["detail"] and "; then " in d["detail"]
        assert transports == {"c10d", "shared memory"}


def test_one_rank_a_host_is_not_hierarchical(hosts2: RankPool) -> None:
    for outcome in hosts2.run(compare_name, ZERO3, {"layers": 1}, HIERARCHICAL):
        outcome.check()
        assert [d["window"]["first_half"] for d in outcome.decisions] == [None] * 4


@pytest.mark.tier("full")
def test_hierarchical_types_and_sizes(hosts4: RankPool) -> None:
    """Gathers keep their bits; sums of 16 bits, means and odd sizes equal fp64's up to rounding."""
    assert hosts4.run(types_and_sizes) == [[]] * 4


def types_and_sizes(rank: int, world: int) -> list[str]:
    group = dist.new_group(list(range(world)))
    bad = []
    cases = [(torch.float32, (3, 5)), (torch.bfloat16, (2, 1, 7)), (torch.float32, (1,)), (torch.float16, (4, 3))]
    for dtype, shape in cases:
        for reduce_op in ("sum", "avg"):

            def step(shard: Tensor, whole: Tensor, reduce_op: str = reduce_op) -> tuple[Tensor, Tensor]:
                return (
                    funcol.all_gather_tensor(shard, 0, group) * 1,
                    funcol.reduce_scatter_tensor(whole, reduce_op, 0, group) * 1,
                )

            everyone = [torch.Generator().manual_seed(7 * r + len(shape)) for r in range(world)]
            shards = [torch.randn(shape, generator=g).to(dtype) for g in everyone]
            wholes = [torch.randn((world * shape[0], *shape[1:]), generator=g).to(dtype) for g in everyone]
            torch.compiler.reset()
            compiled, mark = torch.compile(step, backend="ub_overlap", options=HIERARCHICAL), HISTORY.mark()
            with torch.no_grad(), uncached():
                gathered, reduced = compiled(shards[rank], wholes[rank])
            windows = [d.window for p in HISTORY.since(mark) for d in p.decisions]
            total = sum(w.double() for w in wholes).chunk(world)[rank] / (world if reduce_op == "avg" else 1)  # type: ignore[union-attr]
            if not all(w is not None and w.first_half is not None for w in windows) or len(windows) != 2:
                bad.append(f"{dtype} {shape}: {windows}")
            if not torch.equal(gathered, torch.cat(shards)):
                bad.append(f"{dtype} {shape}: gathered")
            if (reduced.double() - total).abs().max() > 8 * torch.finfo(dtype).eps * total.abs().max().clamp(min=1):
                bad.append(f"{dtype} {shape} {reduce_op}: reduced")
    return bad


def test_groups_of_hierarchical_collectives(hosts4: RankPool) -> None:
    """They are made by the first call, once, are no part of cache keys, and end with the group that they were made from."""
    for found in hosts4.run(made_groups):
        expected = {"made": ["2x2.across", "2x2.within"], "again": True, "same key": True, "left": [], "sessions": []}
        assert found == {"named": 2, **expected}


def made_groups(rank: int, world: int) -> dict[str, Any]:
    group: Any = dist.new_group(list(range(world)))
    name = group.group_name
    before = transport_signature()
    RewritePass(Options()).uuid()  # a graph from a cache is looked up, and not compiled
    found: dict[str, Any] = {"named": compat.group_of(f"{name}.2x2.across").size()}

    def step(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) * 2

    def of_ours() -> list[str]:
        return sorted(own.group_name.removeprefix(f"{name}.") for own in own_groups.groups_made_from(group))

    torch.compiler.reset()
    compiled = torch.compile(step, backend="ub_overlap", options=HIERARCHICAL)
    with torch.no_grad(), uncached():
        first = compiled(torch.ones(2))
        found["made"] = of_ours()
        found["again"] = torch.equal(compiled(torch.ones(2)), first) and of_ours() == found["made"]
    found["same key"] = transport_signature() == before
    dist.barrier()
    dist.destroy_process_group(group)
    deadline = time.monotonic() + 10
    while any(s.group.startswith(f"{name}.") for s in extension().sessions()) and time.monotonic() < deadline:
        time.sleep(0.05)
    found["sessions"] = [s.group for s in extension().sessions() if s.group.startswith(f"{name}.")]
    found["left"] = of_ours()
    return found


def test_a_rank_that_does_not_make_its_group(hosts4: RankPool) -> None:
    """The ranks that wait for it name it and the site, at the deadline. An abort of the user's group ends such a wait."""
    found = hosts4.run(stays_away, 2.0)
    assert found[2]["error"] == "GroupAbortedError", found[2]
    assert found[1]["error"] == "PeerTimeoutError" and found[1]["ranks"] == (3,), found[1]
    assert "ranks 1, 3 of group '" in found[1]["text"] and "/forward.0.first" in found[1]["text"]


def stays_away(rank: int, world: int, init_s: float) -> dict[str, Any]:
    group: Any = dist.new_group(list(range(world)))

    def step(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) * 2

    torch.compiler.reset()
    with reset(), torch.no_grad(), uncached():
        settings.configure(init_timeout_s=init_s)
        compiled = torch.compile(step, backend="ub_overlap", options=HIERARCHICAL)
        if rank == 2:
            threading.Timer(0.5, lambda: ub_overlap.abort(group)).start()
        found = {"error": ""} if rank == world - 1 else attempt(lambda: compiled(torch.ones(2)))
        dist.barrier()
    return found


@pytest.mark.tier("full")
def test_generated_code(hosts2: RankPool) -> None:
    """With Inductor the order is the plan's: starts in front of the matmuls that hide them."""
    (programs, _), other = hosts2.run(calls, SPLIT)
    assert programs == other[0]
    hidden = [n for program in programs for n in hidden_matmuls(program).values()]
    assert len(hidden) == 16 and sum(n > 0 for n in hidden) >= 12, hidden


@pytest.mark.parametrize("options", [{"overlap": "force", "split": "off"}, {"overrides": [{"strategy": "pipelined"}]}])
def test_fused_sites_are_refused(hosts2: RankPool, options: dict[str, Any]) -> None:
    """The collectives are left alone, with the reason, and the results are those of the unfused graph."""
    for outcome in hosts2.run(compare_name, ZERO3, {"layers": 1}, {**options, "inner": "aot_eager"}):
        outcome.check()
        assert len(outcome.decisions) == 4
        for d in outcome.decisions:
            assert (d["strategy"], d["reason"]) == ("none", Reason.NO_TRANSPORT.value), d
            assert "its ranks are on 2 hosts" in d["detail"]


@pytest.mark.tier("full")
def test_auto_takes_parameters_only() -> None:
    """As within a host: gathers of parameters and reductions of gradients, if the network lets them hide."""
    for found, others in FakeRanks(2, hosts="1").run(automatic):
        assert found["forward all_gather split"] > 0 and found["backward reduce_scatter split"] > 0, found
        assert {kind.split()[-1] for kind in found} == {"split", "none"}, found
        assert not any("all_gather split" in kind for kind in others), others


@pytest.mark.tier("full")
def test_small_collectives_are_split_too() -> None:
    """Their latency is worth hiding, alone or in buckets. Look-alike: within a host they are below the threshold alone."""
    for found in FakeRanks(2, hosts="1").run(small):
        assert found["split"] > 0 and found["bucket"] > 0 and found["below_threshold"] == 0, found
    for found in FakeRanks(2).run(small):
        assert found["split"] == 0 and found["below_threshold"] > 0, found


def small(rank: int, world: int) -> Counter[str]:
    """Return the number of collectives by strategy, or by the reason of those that are left alone."""
    case = build(rank, world, ZERO3, {"layers": 3, "width": 512, "mixed": True})
    plans = plans_of(case.module, case.inputs, {"profile": "h200", "inner": "aot_eager"})
    return Counter(
        "bucket" if d.window and d.window.bucket else d.reason.value if d.reason else d.strategy.mode.value
        for plan in plans
        for d in plan.decisions
    )


def test_both_kinds_of_groups_in_one_graph(hosts4: RankPool) -> None:
    """A matmul with a weight gathered across hosts and an activation gathered within: each group has its own transport."""
    for error, decisions, transports in hosts4.run(mixed_groups):
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
    for error, found in hosts4.run(hybrid):
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


def test_hosts_of_groups_are_part_of_cache_keys(hosts4: RankPool) -> None:
    """Two groups of one size, of which one is within a host: a name does not tell them apart in another process."""
    assert hosts4.run(hosts_by_group) == [
        ["0 0", "0 1", "0 0 1 1"], ["0 0", "0 0 1 1"], ["0 1", "0 0 1 1"], ["0 0 1 1"]
    ]  # fmt: skip


def hosts_by_group(rank: int, world: int) -> list[str]:
    groups: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2], list(range(world)))]
    signature = [text.partition(": ") for text in transport_signature() if ": " in text]
    known = {name: hosts for name, _, hosts in signature}
    return [known[g.group_name] for g in groups if g in compat.process_groups()]


def test_a_group_of_ranks_that_are_not_there_is_on_one_host(hosts2: RankPool) -> None:
    """As in mirror mode. Groups of the process are named in the key of every graph."""
    assert hosts2.run(hosts_of_a_mirror) == [["0"]] * 2


def hosts_of_a_mirror(rank: int, world: int) -> list[str]:
    group: Any = dist.new_group(list(range(world)))
    known = compat.global_ranks
    with mock.patch.object(compat, "global_ranks", lambda g: [0, world] if g is group else known(g)):
        signature = [text.partition(": ") for text in transport_signature() if ": " in text]
    return [hosts for name, _, hosts in signature if name == group.group_name]


def test_hosts_are_part_of_cache_keys(hosts2: RankPool) -> None:
    for declared, one in hosts2.run(signatures):
        assert declared != one


def signatures(rank: int, world: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = transport_signature()
    before = settings.current().hosts
    try:
        settings.configure(hosts="")
        return found, transport_signature()
    finally:
        settings.configure(hosts=before)
