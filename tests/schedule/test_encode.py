"""Encoding: the table of docs/explanation/schedules.md, the round trip, and the rows that C++ receives."""

from __future__ import annotations

from dataclasses import astuple
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ub_overlap.runtime.schedule import Key, Schedule, ScheduleError, build, decode, describe, encode, prove_pair, provide
from ub_overlap.runtime.schedule.steps import (
    Buf,
    Compute,
    Copy,
    Finish,
    Flag,
    FlagKind,
    Opaque,
    Queue,
    Reduce,
    Region,
    Signal,
    Step,
    Wait,
)

from .samples import chunk_counts, keys

ANY = Key("bulk_all_gather", 2)
PIECE = Region(Buf.LANDING, 1, 2, Fraction(1, 3), Fraction(2, 3))
FLAG = Flag(FlagKind.READY2, 3, 1, 4)


@pytest.mark.parametrize(
    ("step", "row"),
    [
        (Copy(queue=Queue.COPY, src=Region(Buf.INPUT, 0, 0), dst=PIECE, after=(7, 8)),
         (0, 1, -1, 2, 7, 8, 0, 0, 0, 0, 1, 1, 1, 0, 2, 1, 2, 1, 3, 2, 3, 0)),
        (Signal(queue=Queue.COPY, flag=FLAG, record=5), (1, 1, 5, 0, 2, 3, 1, 4)),
        (Wait(queue=Queue.COMPUTE, flag=FLAG, back=2), (2, 0, -1, 0, 2, 3, 1, 4, 2)),
        (Compute(queue=Queue.COMPUTE, index=6, reads=(PIECE,), writes=(), accumulate=True,
                gates=(Wait(queue=Queue.COMPUTE, flag=FLAG),)),
         (3, 0, -1, 0, 0, 6, 1, 1, 2, 1, 2, 1, 3, 2, 3, 0, 0, 1, 2, 3, 1, 4, 0)),
        (Reduce(queue=Queue.COMPUTE, srcs=(PIECE,), dst=Region(Buf.OUTPUT, 1, 0)),
         (4, 0, -1, 0, 1, 2, 1, 2, 1, 3, 2, 3, 0, 4, 1, 0, 0, 1, 1, 1, 0)),
        (Finish(queue=Queue.COMPUTE, index=9), (5, 0, -1, 0, 9)),
    ],
)  # fmt: skip
def test_rows_are_those_of_the_document(step: Step, row: tuple[int, ...]) -> None:
    schedule = Schedule(ANY, 0, (step,))
    assert encode(schedule) == [row]
    assert decode([row], ANY, 0) == schedule


@given(st.data())
def test_there_and_back(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 8))
    key = data.draw(st.sampled_from(list(keys(ranks, data.draw(st.sampled_from(chunk_counts(ranks)))))))
    rank = data.draw(st.integers(0, ranks - 1))
    schedule = build(key, rank)
    assert decode(encode(schedule), key, rank) == schedule


def test_rows_hold_plain_integers() -> None:
    for key in keys(3, 6):
        assert {type(number) for row in encode(build(key, 1)) for number in row} == {int}


def test_provide_takes_a_plain_tuple() -> None:
    key = Key("all_gather_matmul", 4, 8, (True, False), keep=True)
    rows = provide(astuple(key), 3)
    assert decode(rows, key, 3) == build(key, 3)
    assert provide((key.kind, 4, 8, [1, 0], 0, 0, 0, 1), 3) == rows


def test_provide_refuses_what_cannot_be_built() -> None:
    with pytest.raises(ScheduleError, match="unknown"):
        provide(("all_to_all", 2, 0, (), 0, 0, False, False), 0)


def test_pairs_are_proven() -> None:
    a, b = Key("all_gather_matmul", 3, contracts=(False,)), Key("matmul_reduce_scatter", 3, 6, terms=1)
    prove_pair(astuple(a), astuple(b))
    with pytest.raises(ScheduleError, match="set terms"):
        prove_pair(astuple(a), ("matmul_reduce_scatter", 3, 0, (), 0, 0, False, False))


def test_what_executors_cannot_run_is_refused() -> None:
    with pytest.raises(ScheduleError, match="Opaque nccl"):
        encode(Schedule(ANY, 0, (Opaque(queue=Queue.COMPUTE, name="nccl"),)))
    with pytest.raises(ScheduleError, match="opcode 9"):
        decode([(9, 0, -1, 0)], ANY, 0)
    with pytest.raises(ScheduleError, match=r"compute kind 1 is unknown, expected 0 \(MATMUL\)"):
        decode([(3, 0, -1, 0, 1, 0, 0, 0, 0, 0)], ANY, 0)
    with pytest.raises(ScheduleError, match="1 numbers too many"):
        decode([(5, 0, -1, 0, 9, 9)], ANY, 0)


def test_drawing() -> None:
    text = describe(build(Key("matmul_reduce_scatter", 2, 2, terms=1), 0))
    lines = text.splitlines()
    assert lines[0] == "matmul_reduce_scatter, rank 0 of 2, 2 chunks"
    assert lines[2].split() == ["0", "Compute", "0", "->", "PARTIAL@0[1]", "(0)", "."]
    assert lines[4].split() == ["2", ".", "after", "0:", "Copy", "PARTIAL@0[1]", "->", "LANDING@1[0]"]
    assert len(lines) == 2 + len(build(Key("matmul_reduce_scatter", 2, 2, terms=1), 0).steps)
