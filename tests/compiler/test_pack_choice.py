"""Which matmuls are packed under pack="auto": by the H200 profile, on graphs without ranks."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch

from tests.compiler.dags import Dag, aten
from ub_overlap.compiler.cost import SiteShape, choose, load, predict
from ub_overlap.compiler.fp8.state.cached_weights import cast_neighbors
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.strategy import NONE, Mode, Strategy
from ub_overlap.compiler.select.decide import decide
from ub_overlap.runtime import ops  # noqa: F401  (registers fp8_cached_weight)

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


def gathered_float8(
    ranks: int, channels: int, widths: list[int], options: Options = AUTO, by_rows: bool = True, is_cached: bool = True
) -> Plan:
    """Return the plan of the same gather in float8. `is_cached`: the weights are cast by the weight cache, as siblings."""
    d = Dag(ranks)
    weights = [d.input(f"w{i}", n, channels) for i, n in enumerate(widths)]
    if is_cached:
        pairs = [d.call(torch.ops.ub_overlap.fp8_cached_weight.default, w, d.dtype, -1, None, False, weights) for w in weights]
        operands = [(d.call(operator.getitem, pair, 0), d.t(d.call(operator.getitem, pair, 1))) for pair in pairs]
    d.dtype = torch.float8_e4m3fn
    g = d.gather(d.input("x", 8192 // ranks, channels))
    if not is_cached:
        operands = [(d.input(f"q{i}", n, channels), None) for i, n in enumerate(widths)]
    d.dtype = torch.float32
    s = d.gather(d.input("s", 8192 // ranks, 1)) if by_rows else d.input("s", 1, 1)
    results = []
    for i, (q, scale) in enumerate(operands):
        scale = scale if scale is not None else d.input(f"s{i}", 1, widths[i] if by_rows else 1)
        results.append(d.call(aten._scaled_mm.default, g, d.t(q), s, scale, None, None, torch.bfloat16, True))
    graph = d.output(*results)
    return decide(graph, options, "forward", lambda *_: None, neighbors=cast_neighbors(graph, 0)).plan


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


@pytest.mark.parametrize("widths", [[1024, 256, 256], [3584, 3584]])
def test_float8_casts_of_siblings_need_no_copy(widths: list[int]) -> None:
    """q, k, v and w1, w3 of 8B over 4 ranks. A copy costs the price of its bytes, and that of the scales."""
    free, copied, apart = (
        gathered_float8(4, 4096, widths, replace(AUTO, pack=pack), is_cached=is_cached).decisions[0]
        for pack, is_cached in (("auto", True), ("force", False), ("off", True))
    )
    assert free.packs == copied.packs == (len(widths),) and free.work is not None and free.work.dtype == "float8"
    assert (free.pack_bytes, copied.pack_bytes) == (0, sum(widths) * (4096 + 4))
    best, plain, other = (min(us for _, us in d.predicted) for d in (free, apart, copied))
    assert best < plain and best < other and "packed as" in free.detail


@pytest.mark.parametrize("pack", ["auto", "force"])
def test_float8_with_one_scale_for_each_tensor_stays_apart(pack: str) -> None:
    options = replace(AUTO, pack=pack)
    site = gathered_float8(4, 4096, [1024, 256, 256], options, by_rows=False, is_cached=False).decisions[0]
    assert site.overlapped and site.packs == () and "not packed: each operand has one scale" in site.detail


def test_wide_float8_matmuls_stay_apart() -> None:
    """w1, w3 of 70B over 2 ranks, joined in the graph."""
    site = gathered_float8(2, 8192, [14336, 14336], is_cached=False).decisions[0]
    assert site.packs == () and "not packed: saves less than" in site.detail


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
