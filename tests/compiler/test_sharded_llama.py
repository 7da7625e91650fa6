"""A Llama whose parameters are gathered in the graph, by SimpleFSDP's code and by ours, and with tensor parallelism."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.rank_compile import build
from tests.context_parallel.machine import slow_profile
from tests.harness.ranks import RankPool
from tests.models.compare import Comparison, error, uncached, values
from tests.models.sharded_llama import PARAMETERS
from ub_overlap.compiler.plan.reasons import collective_of
from ub_overlap.compiler.reports.history import HISTORY

pytestmark = pytest.mark.tier("test")

MODEL = "tests.models.sharded_llama"
SPLIT: dict[str, Any] = {"overlap": "off", "inner": "aot_eager", "overrides": [{"strategy": "split"}]}
FORCE: dict[str, Any] = {"overlap": "force", "inner": "aot_eager"}
MATMULS, NORMS = 8, 3
TP = {"forward all_gather": 4, "forward reduce_scatter": 3, "backward all_gather": 3, "backward reduce_scatter": 3}
"""Collectives of tensor parallelism: inputs of attention, feed-forward and head, results of embedding, wo, w2 and head."""


def counts(outcome: Comparison) -> Counter[str]:
    """Return the number of collectives by phase and operation."""
    return Counter(f"{d['phase']} {collective_of(d['kind'])}" for d in outcome.decisions)


def check(pool: RankPool, variant: dict[str, Any], options: dict[str, Any]) -> Comparison:
    """Compare with eager and float64 on all ranks. Return the outcome of the first."""
    outcomes: list[Comparison] = pool.run("tests.models.compare:compare", MODEL, variant, options)
    for outcome in outcomes:
        outcome.check()
    assert [d["strategy"] for d in outcomes[0].decisions] == [d["strategy"] for d in outcomes[-1].decisions]
    return outcomes[0]


def skip_without_torchtitan() -> None:
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12):
        pytest.skip(f"torch {torch.__version__} is too old for torchtitan 0.3.0")
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: pip install --no-deps -r tests/models/requirements.txt")


@pytest.fixture(scope="module")
def titan4() -> Iterator[RankPool]:
    """Ranks that import torchtitan, which breaks the partitioner after transformers."""
    skip_without_torchtitan()
    with RankPool(4) as pool:
        yield pool


@pytest.mark.tier("full")
@pytest.mark.parametrize("budget", [None, 0])
def test_gathered_in_the_graph(pool2: RankPool, budget: float | None) -> None:
    """Every parameter is gathered and every gradient reduced, all split. With a budget of 0 backward gathers again."""
    outcome = check(pool2, {"mixed": budget is None}, {**SPLIT, "memory_budget": budget})
    assert {d["strategy"] for d in outcome.decisions} == {"split"}
    found = counts(outcome)
    assert found["forward all_gather"] == PARAMETERS and found["backward reduce_scatter"] == PARAMETERS, found
    assert found["backward all_gather"] == (MATMULS if budget == 0 else 0), found


@pytest.mark.tier("full")
@pytest.mark.parametrize(("source", "options"), [("example", FORCE), *[("example", SPLIT), ("torchtitan", SPLIT)]])
def test_with_tensor_parallelism(pool4: RankPool, titan4: RankPool, source: str, options: dict[str, Any]) -> None:
    """2 replicas x 2 ranks: collectives of both groups are overlapped, fused or split; plain eager is equal."""
    outcome = check(titan4 if source == "torchtitan" else pool4, {"source": source, "tp": 2}, options)
    found = counts(outcome)
    expected = Counter({"forward all_gather": PARAMETERS, "backward reduce_scatter": PARAMETERS, "backward all_reduce": NORMS})
    assert found == expected + Counter(TP), found
    strategies = Counter(d["strategy"].partition(":")[0] for d in outcome.decisions)
    assert strategies.keys() <= ({"split"} if options is SPLIT else {"pipelined", "bulk", "split"}), strategies
    groups = {d["group"] for d in outcome.decisions if d["strategy"] != "none"}
    assert len(groups) == 2, Counter(f"{d['phase']} {d['kind']} {d['group']} {d['id'][:9]}" for d in outcome.decisions)


@pytest.mark.tier("full")
def test_tensor_parallelism_comes_first(pool4: RankPool) -> None:
    """By predicted times on a slow machine, sites of tensor parallelism have their own matmuls. Gathers and reductions of
    weights are hidden by what is left."""
    weighed = {"inner": "aot_eager", "profile": slow_profile(), "min_bytes": 0}
    outcome = check(pool4, {"tp": 2}, weighed)
    found = [((d["phase"], d["group"]), d["phase"], d["kind"], d["strategy"].partition(":")[0]) for d in outcome.decisions]
    tensor_groups = {group for group, _, kind, _ in found if "matmul" in kind}
    assert len(tensor_groups) == 2, found  # each graph numbers its groups
    fused = Counter((phase, kind) for _, phase, kind, strategy in found if strategy == "pipelined")
    kinds = ("all_gather_matmul", "matmul_reduce_scatter")
    assert fused == dict(zip([(phase, kind) for phase in ("forward", "backward") for kind in kinds], (3, 2, 1, 2), strict=True))
    weights = Counter((phase, strategy) for group, phase, _, strategy in found if group not in tensor_groups)
    assert weights["forward", "split"] == PARAMETERS and {strategy for _, strategy in weights} <= {"split", "bulk"}, weights
    assert weights["backward", "split"] > PARAMETERS / 2, weights


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ({"mixed": True}, {"forward all_gather": PARAMETERS, "backward reduce_scatter": PARAMETERS}),
        (
            {"mode": "hybrid_shard"},
            {"forward all_gather": PARAMETERS, "backward reduce_scatter": PARAMETERS, "backward all_reduce": PARAMETERS},
        ),
        (
            {"mode": "replicate", "tp": 2},
            {**TP, "backward all_reduce": PARAMETERS + NORMS},
        ),
    ],
)  # fmt: skip
def test_torchtitan(titan4: RankPool, variant: dict[str, Any], expected: dict[str, int]) -> None:
    """SimpleFSDP's own code: sharded over 4 ranks, hybrid over 2 x 2, and replicated over 2 with tensor parallelism over 2."""
    outcome = check(titan4, {"source": "torchtitan", **variant}, SPLIT)
    assert counts(outcome) == expected, counts(outcome)
    assert {d["strategy"] for d in outcome.decisions} == {"split"}


def test_torchtitan_on_two_ranks() -> None:
    """SimpleFSDP's own code, with everything split and by predicted times, which on a slow machine leave nothing plain."""
    skip_without_torchtitan()
    weighed = {"inner": "aot_eager", "profile": slow_profile(), "min_bytes": 0}
    expected = {"forward all_gather": PARAMETERS, "backward reduce_scatter": PARAMETERS}
    with RankPool(2) as pool:
        split, chosen = (check(pool, {"source": "torchtitan", "mixed": True}, options) for options in (SPLIT, weighed))
    assert counts(split) == expected and {d["strategy"] for d in split.decisions} == {"split"}
    assert counts(chosen) == expected
    strategies = Counter(d["strategy"].partition(":")[0] for d in chosen.decisions)
    assert strategies.keys() <= {"split", "pipelined", "bulk"} and strategies["split"] > PARAMETERS, strategies


def counted_by_shape(saved: Counter[Any]) -> AbstractContextManager[None]:
    """Count in `saved`, by shape, the tensors that are saved for backward in this context."""

    def pack(tensor: Tensor) -> Tensor:
        saved[tuple(tensor.shape)] += 1
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def saved_shapes(rank: int, world: int, reshard: bool, options: dict[str, Any]) -> tuple[float, Counter[str], Counter[Any]]:
    """Return the error against plain SimpleFSDP, the gathers by phase, and the shapes of what backward reads."""
    plain, case = (build(rank, world, MODEL, {"source": "torchtitan", "reshard": r}) for r in (False, reshard))
    expected, mark, saved = values(plain, plain.module), HISTORY.mark(), Counter[Any]()
    with uncached(), counted_by_shape(saved):
        actual = values(case, torch.compile(case.module, backend="ub_overlap", options=options))
    gathers = Counter(d.phase for p in HISTORY.since(mark) for d in p.decisions if collective_of(d.kind.value) == "all_gather")
    return max(error(actual[name], expected[name], name) for name in expected), gathers, saved


@pytest.mark.tier("full")
@pytest.mark.parametrize("options", [FORCE, SPLIT], ids=["force", "split"])
def test_resharding(titan4: RankPool, options: dict[str, Any]) -> None:
    """SimpleFSDP's checkpoint policy is followed: backward reads shards and gathers all parameters but the embedding again.

    Without it backward reads the gathered parameters, also without the embedding, and gathers none.
    """
    wholes = Counter([(160, 64), *[(96, 64), (64, 64), (32, 64)] * 2, (64, 96), *[(64,)] * NORMS])
    shards = Counter({(shape[0] // 4, *shape[1:]): n for shape, n in (wholes + Counter([(160, 64)])).items()})
    kept, again = (titan4.run(saved_shapes, reshard, options) for reshard in (False, True))
    for (worst, gathers, saved), (worst_again, gathers_again, saved_again) in zip(kept, again, strict=True):
        assert max(worst, worst_again) < 1e-5
        assert gathers == {"forward": PARAMETERS}
        assert gathers_again == {"forward": PARAMETERS, "backward": PARAMETERS - 1}
        assert wholes <= saved and shards <= saved_again and saved - wholes == saved_again - shards, (saved, saved_again)


def kept_for_backward(rank: int, world: int, budget: float | None) -> Counter[Any]:
    """Return the shapes of what backward reads of forward. On the ranks, `build` of the example."""
    case, saved = build(rank, world, MODEL, {}), Counter[Any]()
    with uncached(), counted_by_shape(saved):
        values(case, torch.compile(case.module, backend="ub_overlap", options={**SPLIT, "memory_budget": budget}))
    return saved


@pytest.mark.tier("full")
def test_backward_keeps_shards(pool2: RankPool) -> None:
    """With a budget of 0 backward reads no gathered weight of a matmul, but shards. Those of norms, which are small, stay."""
    for kept, shards in zip(*(pool2.run(kept_for_backward, budget) for budget in (None, 0)), strict=True):
        wholes = Counter({(64, 64): 2, (96, 64): 2, (64, 96): 1, (160, 64): 1})
        assert wholes <= kept and not wholes & shards, (kept, shards)
        assert kept[64,] == shards[64,] == NORMS
        assert all(shards[rows // 2, columns] >= count for (rows, columns), count in wholes.items()), shards


@pytest.mark.tier("full")
@pytest.mark.parametrize(("reshard", "gathered_again"), [("always", PARAMETERS), ("never", 0)])
def test_memory_policy_of_graph_trainer(titan4: RankPool, reshard: str, gathered_again: int) -> None:
    """Its gathers in backward stay there, next to those of forward. They are in backward's phase, as its reductions are."""
    for worst, rows in titan4.run("tests.compiler.rank_apply_passes:graph_trainer", 1, reshard):
        assert worst <= 64 * torch.finfo(torch.float32).eps
        found = Counter(f"{collective_of(row['kind'])} {row['strategy']}" for row in rows)
        expected = {"all_gather none": PARAMETERS, "all_gather split": gathered_again, "reduce_scatter split": PARAMETERS}
        assert found == Counter(expected), found


@pytest.mark.tier("full")
def test_graph_trainer(titan4: RankPool) -> None:
    """apply_passes as one of graph_trainer's passes: a rule finds the backward half of the one graph by autograd's marks."""
    forward, backward = (
        PARAMETERS + sum(n for key, n in TP.items() if key.startswith(half)) for half in ("forward", "backward")
    )
    expected = ["none"] * forward + ["split"] * (backward + NORMS)
    for worst, rows in titan4.run("tests.compiler.rank_apply_passes:graph_trainer"):
        assert worst <= 64 * torch.finfo(torch.float32).eps
        assert [row["strategy"] for row in rows] == expected, [(row["id"], row["module"], row["strategy"]) for row in rows]
        assert {row["phase"] for row in rows} == {"step"} and {row["module"] for row in rows[1:forward]} == {"model"}
