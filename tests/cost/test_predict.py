"""Tests of predictions: monotone, never below the lower bound, equal in all processes, and followed by the choice."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.cost.machine import PLAIN
from tests.harness.ranks import PATIENCE_S
from tests.harness.tiers import full_but
from ub_overlap.compiler.cost import SiteShape, candidates, choose, load, matmul_time, predict
from ub_overlap.compiler.cost.choice import MARGIN, MARGIN_US
from ub_overlap.compiler.cost.curve import at, between
from ub_overlap.compiler.cost.matmul_time import matmul_us
from ub_overlap.compiler.cost.profile_lookup import analytic
from ub_overlap.compiler.plan.strategy import NONE, Mode, Strategy

H200 = load("h200")
PROFILES = [H200, load("h100"), load("cpu"), PLAIN, analytic("NVIDIA A100", 108, (8, 0))]


def sites(ranks: int) -> list[SiteShape]:
    """Return a site of every kind, with the shapes of a 70B model."""
    m, d, f = 4096, 8192, 28672
    return [
        SiteShape("all_gather_matmul", ranks, "bfloat16", ((m, f // ranks, d, False),), m, d),
        SiteShape(
            "all_gather_matmul", ranks, "bfloat16", ((m, d // ranks, d, False), (d // ranks, d, m, True)), m, d, keep=True
        ),
        SiteShape("all_gather_matmul", ranks, "bfloat16", ((d // ranks, d, m, True),), m, d),
        SiteShape("all_gather_matmul", ranks, "float32", ((m, 512, d, True),), m, d, shard_dim_is_last=True),
        SiteShape("matmul_reduce_scatter", ranks, "bfloat16", ((m, d, f // ranks, False),), m, d),
        SiteShape("matmul_reduce_scatter", ranks, "bfloat16", ((m, d, 512, False),) * 3, m, d, outer=2),
        SiteShape("matmul_reduce_scatter", ranks, "float16", ((m, d, 512, False),), m, d, shard_dim_is_last=True),
        SiteShape("matmul_all_reduce", ranks, "bfloat16", ((m, d, f // ranks, False),), m, d),
        SiteShape("bulk_all_gather", ranks, "bfloat16", ((m, d, 1024, False),), m * d, 1),
        SiteShape("bulk_reduce_scatter", ranks, "bfloat16", ((m, d, 1024, False),), m * d, 1),
        SiteShape("bulk_all_reduce", ranks, "bfloat16", ((m, d, 1024, False),), m * d, 1),
    ]


@pytest.mark.parametrize("profile", PROFILES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_never_below_the_floor(profile: object, ranks: int) -> None:
    """No prediction is shorter than the matmuls alone or the pushes alone."""
    for shape in sites(ranks):
        for strategy in candidates(shape, profile):  # type: ignore[arg-type]
            found = predict(shape, strategy, profile)  # type: ignore[arg-type]
            pushes = at(profile.push, shape.shard_bytes) * (ranks - 1) if strategy.chunks <= 1 else 0.0  # type: ignore[attr-defined]
            assert found.us >= found.matmul_us > 0
            if strategy != NONE:
                assert found.us >= pushes * 0.999, (shape, strategy)
            assert all(0 <= begin <= end <= found.us * 1.001 for _, _, begin, end in found.timeline), (shape, strategy)


@pytest.mark.parametrize("strategy", ["none", "pipelined", "pipelined:chunks=1", "pipelined:chunks=16", "pipelined:stripes=2"])
def test_more_bytes_take_no_less(strategy: str) -> None:
    """More bytes with an equal matmul never take less time.

    Rows and columns grow here; a wider dtype on the wire is a different case.
    """
    last = 0.0
    for cols in (256, 1024, 4096, 16384):
        shape = SiteShape("matmul_reduce_scatter", 8, "bfloat16", ((4096, 4096, 1024, False),), 4096, cols)
        found = predict(shape, Strategy.parse(strategy), H200)
        assert found.us > last
        last = found.us


def test_a_chosen_overlap_is_worth_it() -> None:
    for ranks in (2, 4, 8):
        for shape in sites(ranks):
            found = choose(shape, H200)
            us = found.predictions[str(found.strategy)].us
            assert found.gain_us == pytest.approx(found.predictions["none"].us - us)
            if found.strategy != NONE:
                assert found.gain_us > MARGIN_US and us < (1 - MARGIN) * found.predictions["none"].us
            assert str(found.strategy) in found.reason and H200.digest[:8] in found.reason


def test_what_shapes_come_to() -> None:
    """Large matmuls are overlapped, tiny ones are not, and fixed chunks limit the candidates."""
    big = SiteShape("all_gather_matmul", 8, "bfloat16", ((8192, 7168, 8192, False),), 8192, 8192)
    assert choose(big, H200).strategy.mode is Mode.PIPELINED
    tiny = SiteShape("all_gather_matmul", 8, "bfloat16", ((64, 64, 64, False),), 64, 64)
    assert choose(tiny, H200).strategy == NONE
    assert choose(tiny, H200, overlap_only=True).strategy.mode is Mode.PIPELINED
    fixed = choose(big, H200, chunks=16)
    assert set(fixed.predictions) == {"none", "pipelined:chunks=16"}
    assert choose(replace(big, ranks=1), H200).strategy == NONE


def test_candidates() -> None:
    names = lambda shape: [str(s) for s in candidates(shape, H200)]  # noqa: E731
    gather, *_, bulk = sites(8)
    scatter = sites(8)[4]
    assert names(gather) == ["none", *(f"pipelined{c}" for c in (":chunks=1", ":chunks=2", ":chunks=4", "", ":chunks=16"))]
    assert names(scatter) == [*names(gather), "pipelined:stripes=2", "pipelined:stripes=4", "direct"]
    assert names(replace(scatter, shard_dim_is_last=True)) == names(gather)[:-1]
    assert names(bulk) == ["none", "bulk"]
    with pytest.raises(ValueError, match="no schedule"):
        predict(bulk, Strategy(Mode.PIPELINED), H200)


def test_matmul_follows_what_was_measured_nearby() -> None:
    """A measured shape keeps its time up to 5%, and a neighbour takes over its relative error."""
    _, dtype, m, n, k, us = max(H200.matmuls, key=lambda row: row[5])
    assert matmul_us(H200, dtype, "nt", m, n, k) == pytest.approx(us, rel=0.05)
    off = replace(H200, matmuls=tuple((*row[:5], row[5] * 1.5) for row in H200.matmuls))
    assert matmul_us(off, dtype, "nt", m + 128, n, k) == pytest.approx(1.5 * matmul_us(H200, dtype, "nt", m + 128, n, k))


@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_the_nearest_measured_shapes_are_the_nearest(layout: str) -> None:
    """The lookup of the nearest measured shapes agrees with an exhaustive search."""
    rows = [row for row in H200.matmuls if row[1] == "bfloat16"]
    draw = random.Random(3)
    for _ in range(50):
        sizes = [draw.randrange(16, 30000) for _ in range(3)]
        known = []
        for kind, dtype, *there, us in rows:
            apart = sum(math.log2(a / b) ** 2 for a, b in zip(sizes, there, strict=True)) + (kind != layout)
            known.append((apart, math.log(us / matmul_time.analytic_us(H200, dtype, kind, *there))))
        near = sorted(known)[: matmul_time.NEAREST]
        mean = sum(r / (d + matmul_time._SAME) for d, r in near) / sum(1 / (d + matmul_time._SAME) for d, _ in near)
        assert matmul_time._residual(H200, "bfloat16", layout, *sizes) == pytest.approx(mean, rel=1e-9, abs=1e-12)


def test_curves() -> None:
    curve = ((10.0, 5.0), (20.0, 10.0), (40.0, 14.0))
    assert [at(curve, size) for size in (10, 15, 30, 50, 1)] == [5, 7.5, 12, 16, 2.5]
    assert between({2: curve, 8: ((10.0, 15.0), (20.0, 20.0))}, 4, 10) == pytest.approx(10)
    assert between({2: curve}, 8, 10) == 5 and between({}, 2, 1) is None


PROGRAM = """
from tests.cost.test_predict import H200, sites
from ub_overlap.compiler.cost import choose
for ranks in (2, 3, 6, 8):
    for shape in sites(ranks):
        found = choose(shape, H200)
        print(found.strategy, found.reason, [(p.us, p.timeline) for p in found.predictions.values()])
"""


@pytest.mark.tier("full")
def test_same_in_every_process() -> None:
    """Predictions are bitwise equal for any hash seed, because ranks choose separately and must agree."""
    outs = set()
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**__import__("os").environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        outs.add(done.stdout)
    assert len(outs) == 1 and len(outs.pop()) > 10_000


def test_a_float8_wire_sends_half_the_bytes() -> None:
    """FP8 sends 1 byte per element and 4 bytes per 128 columns: pushes are cheaper, the plain collective is unchanged."""
    plain = SiteShape("matmul_reduce_scatter", 4, "bfloat16", ((8192, 4096, 64, False),), 8192, 4096, operands="float8")
    narrow = SiteShape.from_dict({**plain.to_dict(), "wire_dtype": "float8"})
    assert narrow.shard_bytes_on_wire == 2048 * (4096 + 4 * 32) and plain.shard_bytes_on_wire == plain.shard_bytes
    assert narrow.bytes_sent == plain.bytes_sent
    pipelined = Strategy(Mode.PIPELINED)
    before, after = (predict(shape, pipelined, load("h200")) for shape in (plain, narrow))
    assert after.us < before.us and after.communication_us < 0.6 * before.communication_us
    assert predict(narrow, NONE, load("h200")) == predict(plain, NONE, load("h200"))


@pytest.mark.tier("test")
@pytest.mark.parametrize("profile", PROFILES, ids=str)
@pytest.mark.parametrize("ranks", full_but([2], [2, 8]))
def test_most_that_independent_matmuls_can_add(profile: object, ranks: int) -> None:
    """No set of further independent matmuls gains more than `most_us` says, and it says more than 0 only where they help."""
    rng = random.Random(ranks)
    helped = 0
    for shape in sites(ranks):
        before = choose(shape, profile)  # type: ignore[arg-type]
        for _ in range(8):
            more = tuple(tuple(rng.choice([128, 512, 4096]) for _ in range(3)) + (False,) for _ in range(rng.randint(1, 3)))
            independent = 0 if shape.bulk else shape.independent + len(more)
            after = choose(replace(shape, matmuls=(*shape.matmuls, *more), independent=independent), profile)  # type: ignore[arg-type]
            assert after.gain_us <= before.most_us + 0.01, (shape, more)
            helped += after.gain_us > before.gain_us + 1
    assert helped > 5 or profile is not H200


def test_what_hides_all_gains_nothing_more() -> None:
    """A bulk gather behind a matmul that is longer cannot gain more; one behind a short matmul can."""
    long, short = (SiteShape("bulk_all_gather", 8, "bfloat16", ((m, 8192, 8192, False),), 1 << 24, 1) for m in (8192, 256))
    assert choose(long, H200).most_us == pytest.approx(choose(long, H200).gain_us, abs=0.1)
    assert choose(short, H200).most_us > choose(short, H200).gain_us + 20
