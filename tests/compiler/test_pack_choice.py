"""Which matmuls are packed under pack="auto": by the H200 profile, on graphs without ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.compiler.dags import Dag, aten
from ub_overlap.compiler.cost import SiteShape, choose, load, predict
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.strategy import NONE, Mode, Strategy
from ub_overlap.compiler.select.decide import decide

H200 = load("h200")
AUTO = Options(profile="h200")
PIPELINED = Strategy(Mode.PIPELINED)


def gathered(ranks: int, channels: int, widths: list[int], options: Options = AUTO) -> Plan:
    """Return the plan of a gather of 8192 rows with one consumer of each width."""
    d = Dag(ranks)
    x, weights = d.input("x", 8192 // ranks, channels), [d.input(f"w{i}", n, channels) for i, n in enumerate(widths)]
    g = d.gather(x)
    return decide(d.output(*(d.mm(g, d.t(w)) for w in weights)), options, "forward", lambda *_: None).plan


def summed(ranks: int, channels: int, widths: list[int], options: Options = AUTO) -> Plan:
    """Return the plan of a scattered sum of 8192 rows with one term of each inner width."""
    d = Dag(ranks)
    terms = [d.mm(d.input(f"a{i}", 8192, n), d.input(f"b{i}", n, channels)) for i, n in enumerate(widths)]
    total = terms[0]
    for term in terms[1:]:
        total = d.call(aten.add.Tensor, total, term)
    return decide(d.output(d.scatter(total)), options, "backward", lambda *_: None).plan


def only(plan: Plan) -> Decision:
    (decision,) = plan.decisions
    return decision


@pytest.mark.parametrize("make", [gathered, summed])
def test_narrow_matmuls_are_packed(make: object) -> None:
    """q, k, v of 8B over 4 ranks: k and v fill few tiles, and a sum reads its result again for every term."""
    plan = make(4, 4096, [1024, 256, 256])  # type: ignore[operator]
    site = only(plan)
    assert site.packs == (3,) and site.pack_bytes and "packed as 3; predicted us: apart" in site.detail
    apart = only(make(4, 4096, [1024, 256, 256], replace(AUTO, pack="off")))  # type: ignore[operator]
    assert apart.packs == () and apart.pack_bytes == 0 and "pack='off'" in apart.detail
    assert dict(site.predicted)[str(site.strategy)] < dict(apart.predicted)[str(apart.strategy)]
    assert dict(site.predicted)["none"] == dict(apart.predicted)["none"], "without overlap nothing is packed"
    assert Plan.from_json(plan.to_json()) == plan and Plan.from_json(plan.to_json()).digest == plan.digest


def test_wide_matmuls_stay_apart() -> None:
    """w1, w3 of 70B over 2 ranks: the copy of 448 MiB costs more than one launch saves."""
    site = only(gathered(2, 8192, [14336, 14336]))
    assert site.packs == () and "not packed: saves less than" in site.detail


def test_the_largest_stays_apart() -> None:
    """A wide matmul next to narrow ones would be copied for nothing."""
    site = only(gathered(8, 8192, [7168, 128, 128, 128]))
    assert site.packs == (1, 3)
    assert dict(site.shapes)["matmul0"] == "[8192, 8192] @ [8192, 7168]"


def test_packs_are_part_of_the_digest() -> None:
    packed, apart = (gathered(4, 4096, [1024, 256, 256], replace(AUTO, pack=pack)) for pack in ("force", "off"))
    assert packed.digest != apart.digest and packed.shared["sites"][0]["packs"] == [3]  # type: ignore[index]


@pytest.mark.parametrize("make", [gathered, summed])
def test_uneven_ranks_choose_alike(make: object) -> None:
    """The last rank has fewer columns of each weight. All ranks choose by rounded sizes; the bytes are their own."""
    full, last = (only(make(4, 4096, widths)) for widths in ([1024, 256, 256], [1000, 250, 250]))  # type: ignore[operator]
    assert (full.packs, str(full.strategy), full.predicted) == (last.packs, str(last.strategy), last.predicted)
    assert full.packs == (3,) and full.pack_bytes != last.pack_bytes


def test_prediction_of_a_pack() -> None:
    """A packed site costs the wide matmul and the copies; without overlap it costs its matmuls apart."""
    apart = SiteShape("all_gather_matmul", 4, "bfloat16", tuple((8192, n, 4096, False) for n in (1024, 256, 256)), 8192, 4096)
    wide = replace(apart, matmuls=((8192, 1536, 4096, False),))
    packed = replace(apart, packs=(3,), pack_copies=("rhs",))
    free = replace(packed, pack_copies=("",))
    assert packed.copied_bytes == (4096 * 1536 * 2,) and free.copied_bytes == ()
    assert predict(packed, NONE, H200) == predict(apart, NONE, H200)
    assert predict(free, PIPELINED, H200) == predict(wide, PIPELINED, H200)
    assert predict(packed, PIPELINED, H200).us > predict(free, PIPELINED, H200).us
    assert predict(packed, PIPELINED, H200).timeline[0][1] == "pack operands"
    assert choose(packed, H200).gain_us > choose(apart, H200).gain_us


def test_a_further_term_reads_the_sum() -> None:
    """Two terms cost more than one of their inner dims together, by at least the time to read the sum again."""
    sizes = {1: ((8192, 8192, 2048, False),), 2: ((8192, 8192, 1024, False),) * 2}
    one, two = (
        predict(SiteShape("matmul_reduce_scatter", 2, "bfloat16", matmuls, 8192, 8192), PIPELINED, H200).us
        for matmuls in sizes.values()
    )
    assert two - one > 8192 * 8192 * 2 / (H200.compute.memory_gbs * 1e3)
