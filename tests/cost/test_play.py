"""Tests of the simulator against schedules that are small enough to compute by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cost.machine import MIB, PLAIN
from tests.harness.tiers import full_but
from tests.schedule.samples import chunk_counts, keys
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.cost.curve import at
from ub_overlap.compiler.cost.predict import predict
from ub_overlap.compiler.cost.program import CostItem, QueueItem, _program, programs
from ub_overlap.compiler.cost.simulate import SHARE, Contention, play
from ub_overlap.compiler.cost.site_shape import SiteShape
from ub_overlap.compiler.plan.strategy import NONE, Strategy
from ub_overlap.runtime.schedule.builders import build_all
from ub_overlap.runtime.schedule.steps import FlagKind, Key

FREE = Contention(matmul=1.0, push=1.0, event_us=0.0, wait_us=0.0, arrive_us=0.0)


def strategy(text: str) -> Strategy:
    return Strategy.parse(text)


def gather(ranks: int, mib: float, us: float) -> SiteShape:
    """Return a site with shards of `mib` MiB and a matmul of `us` microseconds without launches."""
    rows, cols = ranks * 1024, int(mib * 512)
    n = int(us * 1e9 / (2 * rows * cols))
    return SiteShape("all_gather_matmul", ranks, "bfloat16", ((rows, n, cols, False),), rows, cols)


def scatter(ranks: int, mib: float, us: float) -> SiteShape:
    rows, cols = ranks * 1024, int(mib * 512)
    k = int(us * 1e9 / (2 * rows * cols))
    return SiteShape("matmul_reduce_scatter", ranks, "bfloat16", ((rows, cols, k, False),), rows, cols)


def test_plain_way_is_the_sum() -> None:
    shape = gather(2, 8, 100)
    product = predict(shape, NONE, PLAIN).matmul_us
    assert product == pytest.approx(101, rel=0.03)
    assert predict(shape, NONE, PLAIN).us == pytest.approx(product + 16)


def test_products_that_are_summed_are_copied_in_the_plain_way() -> None:
    """Without overlap, the second matmul adds to a copy of the first product; a schedule adds in place."""
    one, two = (SiteShape("matmul_reduce_scatter", 4, "bfloat16", ((4096, 4096, 1024, False),) * n, 4096, 4096) for n in (1, 2))
    h200 = load("h200")
    more = predict(two, NONE, h200).us - predict(one, NONE, h200).us
    assert more == pytest.approx(predict(one, NONE, h200).matmul_us + at(h200.copy, 4096 * 4096 * 2))
    assert [text for _, text, _, _ in predict(two, NONE, h200).timeline] == ["matmul 0", "matmul 1", "sum 1", "reduce_scatter"]


def test_gather_behind_its_matmul() -> None:
    """2 ranks, long matmul: the push is hidden behind the local half; only one more launch is exposed."""
    shape = gather(2, 8, 100)
    found = predict(shape, strategy("pipelined"), PLAIN)
    assert found.us == pytest.approx(found.matmul_us + 1)
    assert found.communication_us == pytest.approx(8)


def test_gather_that_the_matmul_cannot_hide() -> None:
    """The push of 80 us ends long after the local half; the time is the push plus the other half."""
    shape = gather(2, 80, 20)
    found = predict(shape, strategy("pipelined"), PLAIN)
    assert found.us == pytest.approx(80 + (found.matmul_us + 1) / 2)
    whole = predict(shape, strategy("pipelined:chunks=1"), PLAIN)
    assert whole.us == pytest.approx(80 + found.matmul_us)


def test_scatter() -> None:
    """The peer's shard is computed first and pushed during the local half; then two shards are read and one is written."""
    shape = scatter(2, 8, 100)
    found = predict(shape, strategy("pipelined"), PLAIN)
    assert found.us == pytest.approx(found.matmul_us + 1 + 3 * 8)
    late = predict(scatter(2, 80, 20), strategy("pipelined"), PLAIN)
    assert late.us == pytest.approx((late.matmul_us + 1) / 2 + 80 + 3 * 80)


def test_bulk() -> None:
    """All pushes run during the matmul, followed by one copy of the local shard and one of each peer's."""
    shape = SiteShape("bulk_all_gather", 2, "bfloat16", ((1000, 1000, 50000, False),), 8 * MIB, 1)
    found = predict(shape, strategy("bulk"), PLAIN)
    assert found.matmul_us == pytest.approx(101)
    assert found.us == pytest.approx(101 + 2 * 8)


def test_slow_down_lasts_as_long_as_the_traffic() -> None:
    """A slowdown applies only during traffic.

    A matmul of 100 us with 30 us of traffic at 1.5 does 20 us of work in these 30 us, and the other 80 at full speed.
    """
    items = [QueueItem(False, CostItem("matmul", 1.0)), QueueItem(True, CostItem("push", 1.0))]
    costs = {"matmul": 100.0, "push": 30.0}
    (times,) = play([items], lambda work: costs[work.what], replace(FREE, matmul=1.5))
    assert times == [(0.0, pytest.approx(110.0)), (0.0, pytest.approx(30.0))]
    (times,) = play([items], lambda work: costs[work.what], replace(FREE, push=2.0))
    assert times == [(0.0, pytest.approx(100.0)), (0.0, pytest.approx(60.0))]


def test_pushes_to_one_rank_share_its_port() -> None:
    """Ranks 0 and 1 both push to rank 2 from the beginning; rank 2 pushes to no rank."""
    items = [[QueueItem(True, CostItem("push", 1.0, peer=2))], [QueueItem(True, CostItem("push", 1.0, peer=1))], []]
    times = play(items, lambda _: 10.0, FREE)
    assert [end for rank in times for _, end in rank] == [pytest.approx(10 * 2**SHARE)] * 2


def test_events_flags_and_waits() -> None:
    """Each event, wait and arrival cost is added once: rank 0 pushes after its matmul and signals; rank 1 waits."""
    flag = (FlagKind.READY, 1, 0)
    first = [
        QueueItem(False, CostItem("matmul")),
        QueueItem(True, CostItem("push", peer=1), after=(0,)),
        QueueItem(True, CostItem("flag"), signals=(flag,)),
    ]
    second = [QueueItem(False, CostItem("wait"), waits=(flag,)), QueueItem(False, CostItem("reduce"))]
    costs = {"matmul": 10.0, "push": 5.0, "flag": 1.0, "reduce": 3.0}
    with_costs = replace(FREE, event_us=2.0, wait_us=0.5, arrive_us=4.0)
    one, two = play([first, second], lambda work: costs[work.what], with_costs)
    assert one == [(0, 10), (10, 17), (17, 18)]
    assert two == [(0, 22), (22, 25)]


def test_a_circle_is_an_error() -> None:
    waits = [QueueItem(False, CostItem("wait"), waits=((FlagKind.READY, 1, 0),), text="for ever")]
    with pytest.raises(ValueError, match="for ever"):
        play([waits, waits], lambda _: 1.0, FREE)


KEYS = [
    Key("all_gather_matmul", 4, 0, (False,)),
    Key("all_gather_matmul", 4, 8, (False, True), keep=True),
    Key("all_gather_matmul", 4, 0, (True,)),
    Key("matmul_reduce_scatter", 4, 0, terms=2),
    Key("matmul_reduce_scatter", 4, 2, terms=1, striped=True),
    Key("matmul_all_reduce", 3, 0, terms=1),
    Key("bulk_all_reduce", 4, 0, independent=1),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_one_rank_stands_for_all(key: Key) -> None:
    """For programs that differ only in ring position, simulating one rank equals simulating all ranks."""
    (one,) = programs(key)
    costs = {"matmul": 10.0, "push": 7.0, "copy": 2.0, "reduce": 3.0}

    def cost(work: CostItem) -> float:
        return costs.get(work.what, 1.0) * (work.share or 1.0)

    alone = play([one], cost, FREE)[0]
    for times in play([one] * key.ranks, cost, FREE):
        assert times == [(pytest.approx(begin), pytest.approx(end)) for begin, end in alone]


@pytest.mark.tier("test")
@pytest.mark.parametrize("ranks", full_but([2, 3, 4], [2, 3, 4, 7]))
def test_ranks_that_cut_alike_do_the_same(ranks: int) -> None:
    """Their programs differ only in ring position. With other numbers of chunks they may differ in more."""
    differ = 0
    for chunks in chunk_counts(ranks):
        for key in keys(ranks, chunks):
            if not key.kind.startswith("split"):  # those have no program of their own
                made = {_program(schedule) for schedule in build_all(key)}
                assert len(made) == 1 or chunks % ranks, key
                assert (len(programs(key)) > 1) == (len(made) > 1), key
                differ += len(made) > 1
    assert differ or ranks < 4


def test_every_step_is_played() -> None:
    """No matmul, push or reduction is lost between a schedule and its program."""
    from ub_overlap.runtime.schedule.steps import Compute, Copy, Queue, Reduce

    for key in KEYS:
        for schedule, program in zip(build_all(key), programs(key), strict=False):
            works = [item.work.what for item in program]
            pushes = [s for s in schedule.steps if isinstance(s, Copy) and s.queue is Queue.COPY]
            assert works.count("matmul") == sum(isinstance(s, Compute) for s in schedule.steps)
            assert works.count("reduce") == sum(isinstance(s, Reduce) for s in schedule.steps)
            assert works.count("push") == len(pushes)
            assert sum(item.work.share for item in program if item.work.what == "push") == sum(
                float(s.src.hi - s.src.lo) for s in pushes
            )
