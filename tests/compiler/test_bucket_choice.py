"""Buckets against split collectives and kernels of few tokens in random graphs: plans with them never save less."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.compiler.dags import Dag, aten
from tests.compiler.rank_buckets import buckets
from tests.compiler.test_buckets import few_tokens
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.select.decide import decide
from ub_overlap.compiler.windows import split_planner

NOISE_US = 1.0


def random_graph(seed: int) -> Dag:
    """Return norms and matmuls with gathered weights, and gradients of both, in a random order."""
    pick = random.Random(seed)
    d = Dag(2)
    width = pick.choice([2048, 4096])
    x = d.input("x", pick.choice([512, 2048, 8192]), width)
    whole = [d.input(f"w{i}", width, width) for i in range(3)]
    steps = pick.choices(["norm", "norm gradient", "matmul", "weight", "gradient"], [2, 2, 2, 1, 1], k=pick.randint(6, 26))
    sizes = [(width // 2,) if step == "norm" else (width // 2, width) for step in steps if step in ("norm", "weight")]
    shards = iter([d.input(f"primals_{i + 1}", *size) for i, size in enumerate(sizes)])
    reduced = []
    for step in steps:
        if step == "norm":
            x = d.call(aten.mul.Tensor, x, d.gather(next(shards)))
        elif step == "norm gradient":
            reduced.append(d.scatter(d.call(aten.sum.dim_IntList, x, [0])))
        elif step == "matmul":
            x = d.mm(x, pick.choice(whole))
        elif step == "weight":
            x = d.mm(x, d.gather(next(shards)))
        else:
            reduced.append(d.scatter(d.mm(d.t(x), x)))
    d.output(x, *reduced)
    return d


def saved_us(plan: Plan) -> float:
    """Return what all decisions together save by prediction."""
    predicted = [(dict(d.predicted), str(d.strategy)) for d in plan.decisions if d.overlapped]
    return sum(us["none"] - us[strategy] for us, strategy in predicted)


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", range(40))
def test_buckets_cost_nothing_else(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pick = random.Random(-seed)
    options = few_tokens(tmp_path, pick.choice([0.1, 4.0, 8.0, 9.5]))
    options = Options(
        profile=options.profile,
        split_bytes=pick.choice([1 << 30, 256 << 20, 16 << 20, 8 << 20, 100 << 10, 64 << 10]),
        coalesce=pick.choice(["auto", "auto", "off"]),
    )
    phase = pick.choice(["forward", "backward"])

    def plan() -> Plan:
        return decide(random_graph(seed).graph, options, phase, lambda *_: None).plan

    found = plan()
    monkeypatch.setattr(split_planner, "find_buckets", lambda *_: [])
    without = plan()
    assert set(buckets(without.decisions)) == {"-"}
    assert saved_us(found) > saved_us(without) - NOISE_US
    assert all((d.reason is None) == d.overlapped for d in found.decisions)
    taken = [sum(d.reason is Reason.MATMUL_TAKEN for d in one.decisions) for one in (found, without)]
    assert taken[0] <= taken[1]
