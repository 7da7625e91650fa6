"""The reference executor: any interleaving of proven schedules gives the right rows, and wrong schedules fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ub_overlap.runtime.schedule import Key, build_all, check_reuse
from ub_overlap.runtime.schedule.interpret import Machine, SimulatedCall
from ub_overlap.runtime.schedule.op_contract import extent
from ub_overlap.runtime.schedule.steps import Buf, Region, Wait

from .samples import keys


@st.composite
def programs(draw: st.DrawFn) -> list[SimulatedCall]:
    """Draw calls on one arena: kinds, chunk counts, repetitions and row counts (also 0, and fewer rows than pieces)."""
    ranks = draw(st.integers(1, 8))
    chunks = st.integers(0, 3 * ranks)
    choice = [draw(st.sampled_from(list(keys(ranks, draw(chunks))))) for _ in range(draw(st.integers(1, 3)))]
    sites = []
    for _ in range(draw(st.integers(1, 4))):
        tag = draw(st.integers(0, len(choice) - 1))
        rows = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
        sites.append(SimulatedCall(build_all(choice[tag]), tuple(range(ranks)), tag, tuple(rows)))
    return sites


@pytest.mark.tier("test")
@settings(max_examples=120, deadline=None)
@given(programs(), st.integers(0, 2**32))
def test_every_interleaving_is_right(sites: list[SimulatedCall], seed: int) -> None:
    for a in sites:
        for b in sites:
            check_reuse(a.key, b.key)
    outcome = Machine(sites, seed).run()
    assert outcome.is_clean, outcome
    assert len(outcome.ended) == sum(len(site.group) for site in sites)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2**32))
def test_overlapping_groups_are_right(data: st.DataObject, seed: int) -> None:
    groups = data.draw(st.lists(st.permutations(range(5)).map(lambda p: tuple(p[:3])), min_size=1, max_size=3))
    sites = []
    for _ in range(data.draw(st.integers(1, 6))):
        group = data.draw(st.sampled_from(groups))
        key = data.draw(st.sampled_from(list(keys(3, data.draw(st.sampled_from([0, 1, 4]))))))
        sites.append(SimulatedCall(build_all(key), group, 1, (2, 1, 3)))
    outcome = Machine(sites, seed).run()
    assert outcome.is_clean, outcome


def test_missing_waits_show() -> None:
    """The executor detects wrong rows: without READY waits some interleaving gives them."""
    for key in keys(2, 4):
        good = build_all(key)
        waits = [step for step in good[1].steps if isinstance(step, Wait) and step.back == 0]
        landed = {wait.record for wait in waits}  # events that no step records then
        kept = [step for step in good[1].steps if step not in waits]
        steps = tuple(replace(step, after=tuple(event for event in step.after if event not in landed)) for step in kept)
        site = SimulatedCall((good[0], replace(good[1], steps=steps)), (0, 1), 1, (4, 4))
        assert any(Machine([site], seed).run().wrong for seed in range(20)), key


def test_missing_joins_show() -> None:
    """The executor detects missing joins: it frees inputs at the end of a call, so a later push has no data."""
    key = Key("all_gather_matmul", 2, 0, contracts=(False,))
    good = build_all(key)
    steps = tuple(replace(step, after=()) for step in good[1].steps)
    site = SimulatedCall((good[0], replace(good[1], steps=steps)), (0, 1), 1, (4, 4))
    assert any(Machine([site], seed).run().wrong for seed in range(50))


def test_tags_tell_sites_apart() -> None:
    schedules = build_all(Key("bulk_all_gather", 2))
    one, other = (SimulatedCall(schedules, (0, 1), tag, (1, 1)) for tag in (1, 2))
    outcome = Machine([one, other], 0, skip=[(0, 0)]).run()
    assert "epoch 1 of site 2, expected epoch 1 of site 1" in outcome.mismatched[0]


def test_extents_follow_the_rank_that_data_belongs_to() -> None:
    rows = (4, 7)
    scatter, gather = Key("matmul_reduce_scatter", 2, terms=1), Key("all_gather_matmul", 2, contracts=(True, False))
    assert extent(scatter, rows, Region(Buf.LANDING, 1, 0)) == (0, 7)
    assert extent(scatter, rows, Region(Buf.OUTPUT, 1, 0)) == (0, 7)
    assert extent(scatter, rows, Region(Buf.PARTIAL, 1, 0)) == (0, 4)
    assert extent(gather, rows, Region(Buf.LANDING, 1, 0)) == (0, 4)
    assert extent(gather, rows, Region(Buf.RESULT, 1, 0, index=0)) == (0, 1)
    assert extent(gather, rows, Region(Buf.RESULT, 1, 0, index=1)) == (0, 4)
