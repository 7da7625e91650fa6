"""Operations of our ops in torch.utils.flop_counter, and their times in Inductor's overlap scheduling."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tests.compiler.dags import inputs_of, module_of, random_dag
from tests.compiler.rank_compile import world_name
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.inductor import runtime_estimates
from ub_overlap.compiler.inductor.runtime_estimates import ESTIMATES, SCHEDULES, estimate_own_ops
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.select.decide import decide
from ub_overlap.runtime import ops
from ub_overlap.runtime.stats import site_stats

SPLIT_HALF = [{"strategy": "split", "kind": "*reduce_scatter", "optional": True}]


def counted(run: Any, *inputs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run(*inputs)
    return counter.get_total_flops()


def random_totals(rank: int, world: int, seeds: list[int]) -> tuple[list[str], set[str]]:
    """Return the graphs whose totals differ from the plain ones, and the strategies of all sites."""
    ops.load()
    wrong, strategies = [], set[str]()
    for seed in seeds:
        graph, plain = (random_dag(seed, world, world_name(), 14, torch.float32) for _ in range(2))
        options = parse({"overlap": "force", "overrides": SPLIT_HALF if seed % 2 else None}, frozenset())[0]
        decided = decide(graph, options, "backward", lambda *_: None)
        rewrite(graph, decided.chosen, Outputs(is_backward=True), False, decided.layout)
        strategies |= {d.strategy.mode.value for d in decided.plan.decisions}
        totals = [counted(m, *inputs_of(plain, rank)) for m in (module_of(graph), module_of(plain))]
        if totals[0] != totals[1] or not totals[1]:
            wrong.append(f"seed {seed}: {totals}")
    return wrong, strategies


def test_totals_of_rewritten_graphs(pool2: RankPool) -> None:
    """Fused, bulk and split sites together count what the plain graph counts."""
    for wrong, strategies in pool2.run(random_totals, list(range(12))):
        assert not wrong, wrong
        assert strategies >= {"pipelined", "bulk", "split"}, strategies


def forms(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Return the operations of ops that random graphs lack: (counted, expected)."""
    group, x, w = world_name(), torch.randn(32, 64), torch.randn(64, 48)
    own, f8 = torch.ops.ub_overlap, torch.float8_e4m3fn
    one, lhs, rhs = torch.ones(()), torch.ones(32, 64).to(f8), torch.ones(48, 64).to(f8).t()
    tail = ("none", group, "form")
    reduce = (None, "sum", torch.float32, False, [w], [w.t()])
    calls = {
        "all_reduce": lambda: own.matmul_all_reduce([x], [w], *reduce, *tail),
        "flat": lambda: own.matmul_all_reduce_flat([x], [w], *reduce, *tail),
        "scaled gather": lambda: own.all_gather_scaled_matmul(
            lhs, one, [rhs], [one], [None], 1, False, [torch.bfloat16], False, *tail
        ),
        "scaled scatter": lambda: own.scaled_matmul_reduce_scatter(
            [lhs], [rhs], [one], [one], None, 1, "sum", torch.bfloat16, torch.bfloat16, False, "plain", *tail
        ),
    }  # fmt: skip
    product = 2 * 32 * 64 * 48
    reduced = product + 2 * 64 * 48 * 64
    expected = dict(zip(calls, (reduced, reduced, world * product, product), strict=True))
    return {name: (counted(call), expected[name]) for name, call in calls.items()}


def test_other_ops(pool2: RankPool) -> None:
    for found in pool2.run(forms):
        assert all(got == want for got, want in found.values()), found


def compiled(rank: int, world: int) -> tuple[int, int]:
    """Return the operations of a step, forward and backward: compiled, and eager."""
    w = torch.randn(64, 48, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        gathered = funcol.all_gather_tensor_autograd(x, 0, world_name())
        return funcol.reduce_scatter_tensor_autograd(gathered @ w, "sum", 0, world_name()).sum()

    x = torch.randn(16, 64, requires_grad=True)
    with uncached():
        ours = torch.compile(step, backend="ub_overlap", options={"overlap": "force", "inner": "aot_eager"})
        ours(x, w).backward()
    return counted(lambda: ours(x, w).backward()), counted(lambda: step(x, w).backward())


def test_a_compiled_step(pool2: RankPool) -> None:
    for ours, eager in pool2.run(compiled):
        assert ours == eager == 3 * 2 * 32 * 64 * 48


def test_split_ops_count_nothing() -> None:
    """Look-alike: an op with a formula is taken for one that computes, and timed."""
    ops.load()
    own = torch.ops.ub_overlap
    assert not {own.start_collective, own.finish_collective, own.compare, own.packed_weight} & set(flop_registry)


# --- Inductor's overlap scheduling --------------------------------------------------------------------------------------


def without_python_dispatcher() -> AbstractContextManager[object]:
    """Let `all_gather_object`, by which the scheduler agrees on times, leave the GIL while it queues work.

    Compilation turns the Python dispatcher on, whose ops hold the GIL. torch's gloo group destroys finished work with its queue
    locked, and the last reference to a tensor takes the GIL: then each waits for the other (torch 2.13).
    """
    original = dist.all_gather_object

    def gather(*args: Any, **kwargs: Any) -> None:
        with no_python_dispatcher():
            original(*args, **kwargs)

    return mock.patch.object(dist, "all_gather_object", gather)


def scheduled(rank: int, world: int) -> tuple[float | None, float, int, list[str]]:
    """Compile a fused and a left-alone gather under overlap scheduling. Return the estimate that the scheduler got, the
    prediction, calls of our ops while compiling, and what differs."""
    import torch._inductor.fx_passes.overlap_scheduling as scheduling

    seen: list[float] = []
    own = runtime_estimates.estimate_own_ms

    def spied(node: Any) -> float | None:
        estimate = own(node)
        seen.extend([] if estimate is None else [estimate])
        return estimate

    def function(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        group = world_name()
        fused = funcol.all_gather_tensor(x, 0, group) @ w
        return fused, funcol.all_gather_tensor(y.sin(), 0, group).cos()

    runtime_estimates.estimate_own_ms = spied
    roofline = getattr(scheduling, "estimate_roofline_runtime_ms", None)
    scheduling.estimate_roofline_runtime_ms = lambda node: 0.001  # torch's needs a GPU
    calls, mark = sum(s.calls for s in site_stats().values()), HISTORY.mark()
    x, y, w = torch.randn(16, 64), torch.randn(8, 8), torch.randn(64, 48)
    options = {"overlap": "force", "split": "off", SCHEDULES.replace("-", "_"): True, "profile": "h200"}
    try:
        with uncached(), without_python_dispatcher(), torch.no_grad():
            outs = torch.compile(function, backend="ub_overlap", options=options)(x, y, w)
    finally:
        runtime_estimates.estimate_own_ms = own
        scheduling.estimate_roofline_runtime_ms = roofline
    (plan,) = HISTORY.since(mark)
    wrong = [
        str(i) for i, (a, b) in enumerate(zip(outs, function(x, y, w), strict=True)) if not torch.allclose(a, b, atol=1e-4)
    ]
    ran = sum(s.calls for s in site_stats().values()) - calls
    predicted = dict(plan.decisions[0].predicted)
    return (seen[0] if seen else None), predicted.get(str(plan.decisions[0].strategy), -1.0), ran, wrong


def test_scheduler_gets_the_prediction(pool2: RankPool) -> None:
    """It never runs our op to time it: one call, that of the compiled graph."""
    for estimate, predicted, calls, wrong in pool2.run(scheduled):
        assert not wrong and calls == 1 and estimate is not None, (estimate, predicted, calls, wrong)
        assert estimate * 1e3 == pytest.approx(predicted, abs=0.01)


def test_users_estimates_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our estimate is for our ops, the user's for all others. Without the user's, torch's roofline for memory-bound ops."""
    matmul, sine, gather, wait = (
        torch.fx.Graph().call_function(op)
        for op in (
            torch.ops.aten.mm.default, torch.ops.aten.sin.default, torch.ops.ub_overlap.all_gather_matmul.default,
            torch.ops._c10d_functional.wait_tensor.default,
        )
    )  # fmt: skip
    assert estimate_own_ops({SCHEDULES: False}) == {}
    users = estimate_own_ops({SCHEDULES: True, ESTIMATES: lambda n, size: 5.0})[ESTIMATES]
    assert (users(matmul), users(gather, 3)) == (5.0, 0.0)  # of no plan
    monkeypatch.setattr(compat, "roofline_ms", lambda node: 2.0)
    own = estimate_own_ops({SCHEDULES: True})[ESTIMATES]
    assert [own(n) for n in (matmul, sine, gather, wait)] == [None, 2.0, 0.0, None]
    assert pickle.loads(pickle.dumps(own)).func is own.func  # Inductor's cache keys hold options
