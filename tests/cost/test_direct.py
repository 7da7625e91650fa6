"""Predictions and choice of direct: by hand, against the probe of two H200s, and only where it was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.cost.machine import MIB, PLAIN
from ub_overlap.compiler.cost import SiteShape, candidates, choose, load, predict
from ub_overlap.compiler.cost.curve import at
from ub_overlap.compiler.cost.direct_time import direct_us, link_us
from ub_overlap.compiler.cost.profile import DirectStores, Profile
from ub_overlap.compiler.cost.program import CostItem, QueueItem
from ub_overlap.compiler.cost.simulate import SHARE, Contention, play
from ub_overlap.compiler.plan.strategy import Strategy, parse
from ub_overlap.compiler.select.dispatch_table import DispatchSettings, choose_for_all_sizes
from ub_overlap.runtime.errors import OptionError

DIRECT = Strategy.parse("direct")
H200 = load("h200")
UNMEASURED = replace(H200, direct=None)
PROBE = (
    ("bfloat16", 8, 8192, 8192, 3584, 782.0),
    ("bfloat16", 8, 8192, 8192, 1024, 359.0),
    ("bfloat16", 8, 8192, 4096, 1792, 219.0),
    ("bfloat16", 8, 8192, 4096, 512, 175.0),
    ("bfloat16", 4, 8192, 8192, 7168, 1483.0),
    ("bfloat16", 4, 8192, 8192, 2048, 461.0),
    ("bfloat16", 4, 8192, 4096, 3584, 412.0),
    ("bfloat16", 2, 8192, 8192, 14336, 2986.0),
)
"""Times of two H200s, 2026-11-22, by a probe without our runtime."""
PROBED = replace(H200, direct=DirectStores(360.0, PROBE))


def scatter(ranks: int, m: int, n: int, k: int, **more: object) -> SiteShape:
    return SiteShape("matmul_reduce_scatter", ranks, "bfloat16", ((m, n, k, False),), m, n, **more)  # type: ignore[arg-type]


def by_hand(link_gbs: float, us: float) -> Profile:
    """Return a machine with 1 us for 1 GFLOP, and one measured product [8192, 8192] of 2 ranks."""
    return replace(PLAIN, direct=DirectStores(link_gbs, (("bfloat16", 2, 8192, 8192, 8192, us),)))


def test_analytic_time_is_that_of_the_matmul_or_of_the_link() -> None:
    product = 2 * 8192**3 / 1e9 + 1
    fast, slow = by_hand(1e6, product), by_hand(0.05, product)
    assert direct_us(fast, 2, "bfloat16", 8192, 8192, 8192) == pytest.approx(product)
    analytic = product / 2 + 8192 * 8192 / 0.05 / 1e3
    assert link_us(slow, 2, "bfloat16", 8192, 8192) == pytest.approx(8192 * 8192 / 0.05 / 1e3)
    unmeasured = replace(slow, direct=replace(slow.direct, matmuls=(("bfloat16", 4, 1, 1, 1, 1.0),)))
    assert direct_us(unmeasured, 2, "bfloat16", 8192, 8192, 8192) == pytest.approx(analytic)


def test_a_measured_shape_keeps_its_time_and_a_neighbor_its_ratio() -> None:
    for dtype, ranks, m, n, k, us in PROBE:
        assert direct_us(PROBED, ranks, dtype, m, n, k) == pytest.approx(us, rel=0.08)
    product = 2 * 8192**3 / 1e9 + 1
    profile = by_hand(1e6, 1.25 * product)
    near = direct_us(profile, 2, "bfloat16", 8192, 8192, 4096)
    assert near == pytest.approx(1.25 * (2 * 8192**2 * 4096 / 1e9 + 1), rel=1e-6)


def test_the_whole_call() -> None:
    """Begin, wait and end are free on this machine: the matmul, then a sum of 2 shards."""
    profile = by_hand(1e6, 2 * 8192**3 / 1e9 + 1)
    found = predict(scatter(2, 8192, 8192, 8192), DIRECT, profile)
    assert found.us == pytest.approx(2 * 8192**3 / 1e9 + 1 + at(profile.reduce, 3 * 64 * MIB))
    assert found.communication_us == pytest.approx(link_us(profile, 2, "bfloat16", 8192, 8192))
    assert [text.split()[0] for _, text, _, _ in found.timeline] == ["begin", "Compute", "Signal", "Wait", "Reduce", "end"]


def test_only_measured_groups_are_offered() -> None:
    offers = lambda shape, profile: DIRECT in candidates(shape, profile)  # noqa: E731
    shape = scatter(8, 8192, 8192, 1024)
    assert offers(shape, PROBED) and offers(replace(shape, kind="matmul_all_reduce"), PROBED)
    assert offers(replace(shape, dtype="float16"), PROBED)
    assert offers(shape, H200) and not offers(shape, UNMEASURED) and not offers(shape, load("cpu"))
    assert not offers(replace(shape, ranks=16), PROBED)
    for changed in (
        {"dtype": "float32"}, {"operands": "float8"}, {"shard_dim_is_last": True}, {"matmuls": shape.matmuls * 2},
        {"keep": True}, {"wire_dtype": "float8"}, {"kind": "bulk_reduce_scatter"},
        {"kind": "all_gather_matmul"},
    ):  # fmt: skip
        assert not offers(replace(shape, **changed), PROBED), changed


def test_the_choice_is_made_site_by_site() -> None:
    """By the probe's times direct wins where the link binds, and loses to the copy engine where the matmul does."""
    o, fc2 = scatter(8, 8192, 8192, 1024), scatter(2, 8192, 8192, 14336)
    assert choose(o, PROBED).strategy == DIRECT
    assert choose(fc2, PROBED).strategy != DIRECT
    assert choose(o, H200).strategy == DIRECT and choose(fc2, H200).strategy != DIRECT
    assert choose(o, UNMEASURED).strategy != DIRECT
    slow = replace(PROBED, direct=replace(PROBED.direct, matmuls=tuple((*row[:5], 2 * row[5]) for row in PROBE)))
    assert choose(o, slow).strategy != DIRECT


def test_autotune_times_direct_and_pipelined() -> None:
    shape = scatter(8, 8192, 8192, 1024)
    traced = choose(shape, PROBED)
    found = choose_for_all_sizes(traced, lambda s: choose(s, PROBED), shape, 8192, {}, {}, DispatchSettings(0, True))
    texts = [str(s) for s in found.strategy.strategies]
    assert texts[0] == "direct" and any(t.startswith("pipelined") for t in texts[1:])
    assert parse(str(found.strategy)) == found.strategy


def test_stores_and_pushes_share_a_port() -> None:
    """A direct matmul of rank 0 uses the port of rank 1 like one push: a push of rank 2 to it slows both down."""
    free = Contention(matmul=1.0, push=1.0, event_us=0.0, wait_us=0.0, arrive_us=0.0)
    direct, push = QueueItem(False, CostItem("direct", 2.0)), QueueItem(True, CostItem("push", 1.0, peer=1))
    one, two = play([[direct], []], lambda _: 10.0, free)[0], play([[direct], [push]], lambda _: 10.0, free)
    assert one == [(0.0, pytest.approx(10.0))]
    assert two == [[(0.0, pytest.approx(10.0))], [(0.0, pytest.approx(10.0))]]  # opposite directions
    first, second = play([[push], [direct], []], lambda _: 10.0, free)[:2]
    assert first == second == [(0.0, pytest.approx(10.0))]  # rank 0 receives from 1, and rank 1 from 0
    pushing, storing, _ = play([[replace(push, work=CostItem("push", 1.0, peer=2))], [direct], []], lambda _: 10.0, free)
    shared = 1.5**SHARE  # half of the stores of rank 1 go to rank 2
    assert pushing[0][1] == pytest.approx(10 * shared) and storing[0][1] == pytest.approx(10 * shared)


def test_profiles_keep_direct() -> None:
    assert Profile.from_json(PROBED.to_json(), "here") == PROBED
    assert Profile.from_json(H200.to_json(), "here") == H200 and {row[1] for row in H200.direct.matmuls} == {2, 4, 8}
    assert "direct" not in json.loads(UNMEASURED.to_json())
    found = json.loads(PROBED.to_json())
    for bad, field in (
        ({"link_gbs": 0, "matmuls": [list(PROBE[0])]}, "direct.link_gbs"),
        ({"link_gbs": 1, "matmuls": []}, "direct.matmuls"),
        ({"link_gbs": 1, "matmuls": [["bfloat16", 1, 8, 8, 8, 1.0]]}, r"direct.matmuls\[0\]"),
        ({"link_gbs": 1, "matmuls": [["int8", 2, 8, 8, 8, 1.0]]}, r"direct.matmuls\[0\]"),
        (3, "direct"),
    ):
        with pytest.raises(OptionError, match=field):
            Profile.from_json(json.dumps({**found, "direct": bad}), "here")
