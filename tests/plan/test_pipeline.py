"""Tests of planned pipelines: bubbles computed by hand, torch's own tables, messages, and the command."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from ub_overlap.cli import main
from ub_overlap.runtime.errors import OptionError
from ub_overlap.tools.planner.pipeline_orders import SCHEDULES, PipelineOrder, Work, fits, pipeline_order
from ub_overlap.tools.planner.pipeline_run import PipelineRun, StageTimes, play
from ub_overlap.tools.planner.planned_pipeline import plan_schedules
from ub_overlap.tools.planner.sizes import PlannedBlock

F, I, W = 3.0, 4.0, 2.0  # noqa: E741 (the field's names)
TIMES = StageTimes(F, I + W, I, W)
UNIT = StageTimes(1.0, 1.0, 1.0, 1.0)


def free(source: int, destination: int) -> float:
    return 0.0


def run(
    name: str, ranks: int, virtual: int, microbatches: int, times: StageTimes = TIMES, us: Any = free, first: bool = False
) -> PipelineRun:
    return play(pipeline_order(name, ranks, virtual, microbatches), times, us, first)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 16), (8, 32)])
def test_bubbles_by_hand(ranks: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1), and with v stages a rank (p - 1) / (vm + p - 1)."""
    for name in ("GPipe", "1F1B"):
        assert run(name, ranks, 1, microbatches).bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    for virtual in (2, 3):
        found = run("Interleaved1F1B", ranks, virtual, microbatches)
        assert found.us == pytest.approx((virtual * microbatches + ranks - 1) * (F + I + W))
        assert found.bubble == pytest.approx((ranks - 1) / (virtual * microbatches + ranks - 1))


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_a_send_before_weight_gradients_leaves_them_out_of_the_bubble(name: str) -> None:
    ranks, microbatches = 4, 8
    assert run(name, ranks, 1, microbatches).us == pytest.approx((microbatches + ranks - 1) * (F + I + W))
    found = run(name, ranks, 1, microbatches, first=True).us
    assert found == pytest.approx(microbatches * (F + I + W) + (ranks - 1) * (F + I))


def test_zero_bubble() -> None:
    """In a V with equal times only the first outputs and the last gradients are waited for."""
    ranks, microbatches = 4, 16
    found = run("ZBVZeroBubble", ranks, 2, microbatches, StageTimes(1.0, 2.0, 1.0, 1.0))
    assert found.us == 6 * microbatches + ranks - 1
    assert found.bubble < run("Interleaved1F1B", ranks, 2, microbatches, StageTimes(1.0, 2.0, 1.0, 1.0)).bubble


def torch_table(name: str, ranks: int, virtual: int, microbatches: int) -> list[list[Any]]:
    stages: list[Any] = [
        SimpleNamespace(num_stages=ranks * virtual, group_size=ranks, group_rank=0, stage_index=i, submod=None)
        for i in range(virtual)
    ]
    schedule = get_schedule_class(name)
    made = schedule(stages if virtual > 1 else stages[0], microbatches, loss_fn=print)  # type: ignore[arg-type]
    assert made.pipeline_order is not None
    return [made.pipeline_order[rank] for rank in range(ranks)]


@pytest.mark.parametrize(("name", "virtual"), [("Interleaved1F1B", 2), ("LoopedBFS", 2), ("ZBVZeroBubble", 2)])
def test_idle_places_of_torchs_tables(name: str, virtual: int) -> None:
    """With equal times no action begins later than torch's table has it, which has idle places for this.

    Interleaved1F1B has more of them than equal times need.
    """
    for row, entries in zip(run(name, 4, virtual, 8, UNIT).ranks, torch_table(name, 4, virtual, 8), strict=True):
        places = {str(entry): i for i, entry in enumerate(entries) if entry is not None}
        for played in row:
            assert played.begin_us <= places[str(played.action)], f"{name}: {played.action}"
        assert [str(p.action) for p in row] == list(places), "the order is torch's"
    if name != "Interleaved1F1B":
        assert max(len(entries) for entries in torch_table(name, 4, virtual, 8)) == run(name, 4, virtual, 8, UNIT).us


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_orders_without_a_table(name: str) -> None:
    """torch draws these two. Its drawing of 1F1B gives the last rank wrong microbatches."""
    own = pipeline_order(name, 4, 1, 8)
    for rank, entries in enumerate(torch_table(name, 4, 1, 8)):
        drawn = [str(e) for e in entries if e is not None and e.computation_type.value in "FB"]
        if (name, rank) != ("1F1B", 3):
            assert [str(a) for a in own.ranks[rank]] == drawn
    assert "".join(a.work.value for a in pipeline_order("1F1B", 4, 1, 3).ranks[3]) == "FBFBFB"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_once_and_in_time(name: str) -> None:
    virtual = SCHEDULES[name] or 2
    found = run(name, 4, virtual, 8, us=lambda *_: 0.5)
    ends = {str(p.action): p.end_us for row in found.ranks for p in row}
    begins = {str(p.action): p.begin_us for row in found.ranks for p in row}
    last = found.order.stages - 1
    assert len(ends) == sum(map(len, found.ranks)), "an action occurs twice"
    for stage in range(last + 1):
        for m in range(8):
            backward = f"{stage}B{m}" if f"{stage}B{m}" in ends else f"{stage}I{m}"
            before = [] if stage == 0 else [f"{stage - 1}F{m}"]
            assert all(ends[one] <= begins[f"{stage}F{m}"] for one in before)
            after = [f"{stage}F{m}"] if stage == last else [f"{stage + 1}B{m}", f"{stage + 1}I{m}"]
            assert all(ends[one] <= begins[backward] for one in after if one in ends)
            assert backward[1] == "B" or ends[backward] <= begins[f"{stage}W{m}"]
    for row in found.ranks:
        assert all(a.end_us <= b.begin_us for a, b in itertools.pairwise(row))


def test_messages_by_hand() -> None:
    """One microbatch passes all stages and comes back: 2 (p - 1) messages."""
    for first in (False, True):
        found = run("1F1B", 3, 1, 1, us=lambda *_: 10.0, first=first)
        gradients = 2 * (I if first else I + W) + I + W
        assert found.us == pytest.approx(3 * F + gradients + 4 * 10.0)


def test_messages_of_a_channel_follow_each_other() -> None:
    """Rank 0 of GPipe computes faster than its messages pass: the last of four arrives after four messages."""
    found = run("GPipe", 2, 1, 4, us=lambda *_: 10.0)
    forward = [p for p in found.ranks[1] if p.action.work is Work.FORWARD]
    assert forward[-1].begin_us == pytest.approx(F + 4 * 10.0)


def test_activations_in_flight() -> None:
    assert run("GPipe", 4, 1, 8).in_flight == 8
    assert run("1F1B", 4, 1, 8).in_flight == 4
    assert run("ZBVZeroBubble", 4, 2, 8).in_flight == 8


def test_a_v_has_both_ends_on_the_first_rank() -> None:
    assert pipeline_order("ZBVZeroBubble", 3, 2, 6).rank_of == (0, 1, 2, 2, 1, 0)
    assert pipeline_order("Interleaved1F1B", 3, 2, 6).rank_of == (0, 1, 2, 0, 1, 2)


def test_schedules_that_fit() -> None:
    assert [name for name in SCHEDULES if fits(name, 1)] == ["GPipe", "1F1B"]
    assert "ZBVZeroBubble" not in [name for name in SCHEDULES if fits(name, 3)]
    block = PlannedBlock(hidden=64, ffn=128, heads=8, kv_heads=4, seq=32, tp=2, pp=4, virtual=3, microbatches=9)
    names = [s.schedule for s in plan_schedules(block, TIMES, free)]
    assert "Interleaved1F1B" not in names and "LoopedBFS" in names, "torch wants a multiple of the rounds"
    with pytest.raises(OptionError, match="Interleaved1F1B does not run"):
        pipeline_order("Interleaved1F1B", 4, 3, 9)


def test_an_order_that_cannot_go_on_is_an_error() -> None:
    order = pipeline_order("1F1B", 2, 1, 2)
    stuck = PipelineOrder("stuck", (tuple(reversed(order.ranks[0])), order.ranks[1]), order.rank_of)
    with pytest.raises(AssertionError, match="stuck: no rank can go on"):
        play(stuck, TIMES, free)


SMALL = ["--hidden=64", "--ffn=128", "--heads=8", "--seq=32", "--tp=2", "--dtype=fp32", "--profile=cpu", "--quiet"]


@pytest.mark.tier("test")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    flags = ["--pp", "2", "--virtual", "2", "--microbatches", "4", "--html", str(page)]
    assert main(["plan", *SMALL, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    pipeline = found["pipeline"]
    assert pipeline["message_bytes"] == 16 * 64 * 4
    us = pipeline["stage_us"]
    assert us["F"] + us["B"] == pytest.approx(found["step"]["chosen_us"])
    assert us["I"] > 0 and us["W"] > 0 and us["I"] + us["W"] == pytest.approx(us["B"], rel=0.3)
    steps = [s["us"] for s in pipeline["schedules"]]
    assert steps == sorted(steps) and len(steps) == 7
    text = page.read_text()
    assert text.count('<details class="pipeline"') == 7 and "input gradient of microbatch 3, stage 3" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pp", "2"], "--pp needs --microbatches"),
        (["--virtual", "2"], "1 without --pp"),
        (["--pp", "0", "--microbatches", "4"], "at least 1"),
        (["--pp", "3", "--microbatches", "4", "--ranks-per-host", "4"], "a divisor of all ranks"),
    ],
)
def test_bad_numbers(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) if "--pp needs" in message else contextlib.nullcontext():
        assert main(["plan", *SMALL, *flags]) == 2
    assert message in capsys.readouterr().err
