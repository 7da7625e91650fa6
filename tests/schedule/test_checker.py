"""Each rule of the checker, on small hand-written schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from ub_overlap.runtime.schedule import Key, Schedule, ScheduleError, build_all, check, check_sequence
from ub_overlap.runtime.schedule.checker import check_released
from ub_overlap.runtime.schedule.interpret import Machine, SimulatedCall
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

GATHER = Key("bulk_all_gather", 2)
COMPUTE, COPY = Queue.COMPUTE, Queue.COPY


def ready(rank: int, source: int) -> Flag:
    return Flag(FlagKind.READY, rank, source)


def push(rank: int, peer: int) -> Copy:
    return Copy(queue=COPY, src=Region(Buf.INPUT, rank, rank), dst=Region(Buf.LANDING, peer, rank))


def both(make: Callable[[int, int], list[Step]], key: Key = GATHER) -> tuple[Schedule, ...]:
    """Return the schedules of two symmetric ranks, from make(rank, peer)."""
    return tuple(Schedule(key, rank, tuple(make(rank, 1 - rank))) for rank in (0, 1))


def gather(rank: int, peer: int) -> list[Step]:
    """Return a correct bulk_all_gather of two ranks, without DONE."""
    return [
        push(rank, peer),
        Signal(queue=COPY, flag=ready(peer, rank), record=0),
        Copy(queue=COMPUTE, src=Region(Buf.INPUT, rank, rank), dst=Region(Buf.OUTPUT, rank, rank)),
        Wait(queue=COMPUTE, flag=ready(rank, peer)),
        Copy(queue=COMPUTE, after=(0,), src=Region(Buf.LANDING, rank, peer), dst=Region(Buf.OUTPUT, rank, peer)),
    ]


def refused(rule: str, schedules: tuple[Schedule, ...], says: str = "") -> None:
    with pytest.raises(ScheduleError, match=says) as error:
        check(schedules)
    assert error.value.rule == rule, error.value


def edited(place: int, *steps: Step) -> tuple[Schedule, ...]:
    """Return `gather` with rank 1's step `place` replaced by `steps`."""
    good = both(gather)
    return good[0], replace(good[1], steps=(*good[1].steps[:place], *steps, *good[1].steps[place + 1 :]))


def test_a_good_call_passes() -> None:
    check(both(gather))


def test_group_must_be_complete_and_alike() -> None:
    good = both(gather)
    refused("group", (), "no schedules")
    refused("group", good[:1], "1 schedules for 2 ranks")
    refused("group", good[::-1], "schedule 0 is for rank 1")


def test_unknown_and_repeated_events() -> None:
    good = both(gather)[1].steps
    refused("event", edited(1, replace(good[1], record=5)), "rank 1 step 4 .* waits for event 0")
    refused("event", edited(0, replace(good[0], record=0)), "records event 0")


def test_flag_rules() -> None:
    good = both(gather)[1].steps
    refused("flag", edited(1, replace(good[1], flag=ready(0, 0))), "its own flags")
    refused("flag", edited(3, replace(good[3], flag=ready(0, 1))), "own memory")
    refused("flag", edited(1, good[1], replace(good[1], record=None)), "signalled twice")
    refused("flag", edited(3, replace(good[3], flag=Flag(FlagKind.READY, 1, 0, 7))), "no step of epoch 1 sends")
    refused("flag", edited(3, replace(good[3], back=2)), "expected 0, its own epoch")
    refused("flag", edited(3, replace(good[3], flag=Flag(FlagKind.DONE, 1, 0), back=1)), "expected a multiple of 2")


def test_circular_wait() -> None:
    def stuck(rank: int, peer: int) -> list[Step]:
        steps = gather(rank, peer)
        return [replace(steps[3], queue=COPY), *steps[:3], steps[4]]

    refused("circular wait", both(stuck), "rank 0 step 0 .* rank 1 step 0")


def test_issue_order_of_one_thread() -> None:
    """A push after a blocking wait is refused: two queues can run it, but a single host thread never issues the push."""

    def late_push(rank: int, peer: int) -> list[Step]:
        steps = gather(rank, peer)
        return [steps[3], *steps[:3], steps[4]]

    refused("issue order", both(late_push), "one hardware queue")


def test_race_with_a_push() -> None:
    good = both(gather)[1].steps
    moved = (*good[:2], good[2], replace(good[4], after=()), replace(good[3], after=(0,)))
    schedules = both(gather)[0], replace(both(gather)[1], steps=moved)
    # Depending on the order of the checks, the read is unordered with the push or comes before it.
    with pytest.raises(ScheduleError, match=r"LANDING@1\[0\]") as error:
        check(schedules)
    assert error.value.rule in ("race", "unwritten")


def test_reads_need_writes_and_stores_come_once() -> None:
    good = both(gather)[1].steps
    refused("unwritten", edited(4, replace(good[4], src=Region(Buf.LANDING, 1, 1))), "before it is written")
    refused("written twice", edited(2, good[2], good[2]), "stores OUTPUT@1")


def test_region_rules() -> None:
    good = both(gather)[1].steps
    refused("region", edited(0, replace(good[0], dst=Region(Buf.LANDING, 2, 1))), "does not exist")
    refused("region", edited(0, replace(good[0], dst=Region(Buf.OUTPUT, 0, 1))), "pushes to a peer.s arena")
    refused("region", edited(4, replace(good[4], src=Region(Buf.LANDING, 0, 1))), "pushes to a peer.s arena")
    refused("region", edited(2, replace(good[2], dst=Region(Buf.INPUT, 1, 0))), "belongs to the caller")
    refused("region", edited(2, replace(good[2], dst=Region(Buf.OUTPUT, 1, 1, index=3))), "only RESULT has an index")


def direct(rank: int, peer: int, **changes: Step) -> list[Step]:
    """Return a direct scatter of two ranks, without DONE. `changes`: other steps by name."""
    writes = (Region(Buf.LANDING, peer, rank), Region(Buf.LANDING, rank, rank))
    steps: dict[str, Step] = {
        "matmul": Compute(queue=COMPUTE, index=0, reads=(), writes=writes),
        "tell": Signal(queue=COMPUTE, flag=ready(peer, rank)),
        "hear": Wait(queue=COMPUTE, flag=ready(rank, peer)),
        "sum": Reduce(
            queue=COMPUTE,
            srcs=(Region(Buf.LANDING, rank, 0), Region(Buf.LANDING, rank, 1)),
            dst=Region(Buf.OUTPUT, rank, 0),
        ),
    }
    return list({**steps, **changes}.values())


DIRECT = Key("matmul_reduce_scatter", 2, terms=1, direct=True)


def test_a_matmul_may_store_at_a_peer() -> None:
    check(both(direct, DIRECT))
    with pytest.raises(ScheduleError) as error:  # nothing frees the slot
        check_sequence([both(direct, DIRECT)] * 2, epochs=[1, 3])
    assert error.value.rule == "slot reuse"


def test_direct_stores_are_told_and_awaited() -> None:
    good = both(direct, DIRECT)

    def early(rank: int, peer: int) -> list[Step]:
        matmul, tell, *rest = direct(rank, peer)
        return [tell, matmul, *rest]

    with pytest.raises(ScheduleError, match=r"LANDING@\d") as error:  # told before the store
        check((good[0], both(early, DIRECT)[1]))
    assert error.value.rule in ("race", "unwritten")
    deaf = [step for step in direct(1, 0) if not isinstance(step, Wait)]
    with pytest.raises(ScheduleError) as error:
        check((good[0], replace(good[1], steps=tuple(deaf))))
    assert error.value.rule in ("race", "unwritten")


def test_direct_shards_go_to_their_owners() -> None:
    key = replace(DIRECT, ranks=3)
    schedules = build_all(key)
    place = next(i for i, step in enumerate(schedules[1].steps) if isinstance(step, Compute))
    matmul = schedules[1].steps[place]
    assert isinstance(matmul, Compute)

    def storing(*writes: Region) -> tuple[Schedule, ...]:
        steps = (*schedules[1].steps[:place], replace(matmul, writes=writes), *schedules[1].steps[place + 1 :])
        return schedules[0], replace(schedules[1], steps=steps), schedules[2]

    check(storing(*matmul.writes[::-1]))  # any order
    refused("region", storing(Region(Buf.OUTPUT, 2, 0), *matmul.writes[1:]), "pushes to a peer.s arena")
    refused("region", storing(Region(Buf.PARTIAL, 2, 2), *matmul.writes[1:]), "pushes to a peer.s arena")
    refused("unwritten", storing(*matmul.writes[:2], Region(Buf.PARTIAL, 1, 1)), r"reads LANDING@1\[1\]")
    refused("written twice", storing(matmul.writes[0], *matmul.writes), "stores LANDING@2")
    with pytest.raises(ScheduleError, match=r"LANDING@2\[0\]"):  # the place of another sender
        check(storing(Region(Buf.LANDING, 2, 0), *matmul.writes[1:]))


def test_only_direct_products_land() -> None:
    refused("meaning", both(direct, replace(DIRECT, direct=False)), "expected PARTIAL")


@pytest.mark.parametrize("kind", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_choose_direct_by_themselves(kind: str, ranks: int) -> None:
    """Each rank may store at the owners or push, in any call: the peers see the same rows and flags."""
    key = Key(kind, ranks, terms=1)
    pushing, storing = build_all(key), build_all(replace(key, direct=True))
    mixes = [tuple(storing[r] if mask >> r & 1 else pushing[r] for r in range(ranks)) for mask in range(1 << ranks)]
    for mix, next_mix in zip(mixes, mixes[::-1], strict=True):
        check(mix)
        check_released(mix)
        check_sequence([mix, next_mix, mix], epochs=[1, 3, 5])
        sites = [SimulatedCall(group, tuple(range(ranks)), 1, tuple(2 + r for r in range(ranks))) for group in (mix, next_mix)]
        for seed in range(3):
            outcome = Machine([*sites, *sites], seed).run()
            assert outcome.is_clean, (mix, outcome)


def test_only_direct_may_differ_between_ranks() -> None:
    striped = build_all(Key("matmul_reduce_scatter", 2, 1, terms=1, striped=True))
    plain = build_all(Key("matmul_reduce_scatter", 2, terms=1))
    refused("group", (plain[0], striped[1]), "schedule 1 is for rank 1")
    # A rank that stores at the owners must not tell them as if it had pushed two pieces.
    pieces, direct = build_all(Key("matmul_reduce_scatter", 2, 4, terms=1)), build_all(DIRECT)
    with pytest.raises(ScheduleError):
        check((direct[0], pieces[1]))


def test_join_rule() -> None:
    good = both(gather)[1].steps
    refused("join", edited(4, replace(good[4], after=())), "may still run when the call ends")
    refused("join", both(lambda rank, peer: [push(rank, peer)]), "no COMPUTE step")


def test_heard_rule() -> None:
    """Rank 0 uses no data of rank 1 in this op, so only the heard rule detects the missing wait."""
    key = Key("bulk_all_gather", 2, independent=1)
    steps = [Compute(queue=COMPUTE, index=0, reads=(), writes=(Region(Buf.RESULT, rank, 0),)) for rank in (0, 1)]
    refused("heard", both(lambda rank, peer: [steps[rank]], key), "rank 0 ends without having waited for rank 1")


def test_wrong_results() -> None:
    good = both(gather)[1].steps
    refused("result", edited(2), r"OUTPUT@1\[1\] ends as None")
    refused("result", edited(4, replace(good[4], src=Region(Buf.INPUT, 1, 1))), "OUTPUT@1")


def test_sums_out_of_rank_order_are_refused() -> None:
    schedules = build_all(Key("bulk_reduce_scatter", 2))
    place = next(i for i, step in enumerate(schedules[1].steps) if isinstance(step, Reduce))
    steps = list(schedules[1].steps)
    steps[place] = replace(steps[place], srcs=steps[place].srcs[::-1])
    refused("result", (schedules[0], replace(schedules[1], steps=tuple(steps))), "OUTPUT")


def test_contractions_count_every_shard_once_and_are_rounded() -> None:
    schedules = build_all(Key("all_gather_matmul", 2, contracts=(True,)))
    steps = schedules[1].steps
    place = [i for i, step in enumerate(steps) if isinstance(step, Compute)][1]
    doubled = replace(schedules[1], steps=(*steps[:place], steps[place], *steps[place:]))
    refused("meaning", (schedules[0], doubled), "a second time")
    left_out = replace(schedules[1], steps=(*steps[:place], *steps[place + 1 :]))
    refused("result", (schedules[0], left_out), "sums 1 of 2 parts")
    unrounded = replace(schedules[1], steps=tuple(step for step in steps if not isinstance(step, Finish)))
    refused("result", (schedules[0], unrounded), "never rounded")


def test_sums_are_rounded_last() -> None:
    schedules = build_all(Key("all_gather_matmul", 2, contracts=(True,)))
    steps = list(schedules[1].steps)
    place = next(i for i, step in enumerate(steps) if isinstance(step, Finish))
    steps[place - 1], steps[place] = steps[place], steps[place - 1]
    refused("meaning", (schedules[0], replace(schedules[1], steps=tuple(steps))), "already rounded")


def test_pieces_keep_their_interval() -> None:
    """Halves that are swapped on push and swapped back on arrival are right only for an even number of rows."""
    halves = [(Fraction(0), Fraction(1, 2)), (Fraction(1, 2), Fraction(1))]

    def crossed(rank: int, peer: int) -> list[Step]:
        steps = gather(rank, peer)
        pushes = [
            replace(push(rank, peer), dst=Region(Buf.LANDING, peer, rank, *there), src=Region(Buf.INPUT, rank, rank, *here))
            for here, there in zip(halves, halves[::-1], strict=True)
        ]
        takes = [
            replace(steps[4], src=Region(Buf.LANDING, rank, peer, *there), dst=Region(Buf.OUTPUT, rank, peer, *here))
            for here, there in zip(halves, halves[::-1], strict=True)
        ]
        return [*pushes, *steps[1:4], *takes]

    refused("meaning", both(crossed), "different intervals")


def test_sums_take_equal_intervals() -> None:
    schedules = build_all(Key("bulk_reduce_scatter", 2))
    steps = [
        replace(step, dst=replace(step.dst, hi=Fraction(1, 2))) if isinstance(step, Reduce) else step
        for step in schedules[1].steps
    ]
    refused("meaning", (schedules[0], replace(schedules[1], steps=tuple(steps))), "sums different intervals")


def test_only_gathers_have_gathered_operands() -> None:
    schedules = build_all(Key("bulk_all_gather", 2, independent=1))
    steps = [
        replace(step, reads=(Region(Buf.INPUT, 1, 1),)) if isinstance(step, Compute) else step for step in schedules[1].steps
    ]
    refused("meaning", (schedules[0], replace(schedules[1], steps=tuple(steps))), "only OPERANDs")


@pytest.mark.parametrize("kind", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize(
    ("change", "rule", "says"),
    [
        (lambda step: [replace(step, reads=(Region(Buf.INPUT, 1, 1),))], "meaning", "only OPERANDs"),
        (
            lambda step: [replace(step, writes=(replace(step.writes[0], hi=Fraction(1, 2)),))],
            "meaning",
            "all of its own RESULT",
        ),
        (lambda step: [replace(step, index=step.index + 1)], "meaning", "all of its own RESULT"),
        (lambda step: [], "result", "cell 0 of RESULT"),
    ],
    ids=["reads", "part", "index", "absent"],
)
def test_independent_matmuls_are_whole_and_complete(
    kind: str, change: Callable[[Compute], list[Step]], rule: str, says: str
) -> None:
    gathers = kind == "all_gather_matmul"
    key = Key(kind, 2, contracts=(False,) if gathers else (), terms=0 if gathers else 1, independent=1)
    schedules = build_all(key)
    steps: list[Step] = []
    for step in schedules[1].steps:
        steps += change(step) if isinstance(step, Compute) and key.is_independent(step) else [step]
    refused(rule, (schedules[0], replace(schedules[1], steps=tuple(steps))), says)


def gated(rank: int, peer: int, gates: bool) -> list[Step]:
    """Return a gather whose matmul waits for its own operand."""
    own, theirs = Region(Buf.INPUT, rank, rank), Region(Buf.LANDING, rank, peer)
    gate = Wait(queue=COMPUTE, flag=ready(rank, peer))
    results = (Region(Buf.RESULT, rank, rank), Region(Buf.RESULT, rank, peer))
    return [
        push(rank, peer),
        Signal(queue=COPY, flag=ready(peer, rank), record=0),
        Compute(queue=COMPUTE, after=(0,), index=0, reads=(own, theirs), writes=results, gates=(gate,) if gates else ()),
    ]


def test_gates_order_what_their_matmul_reads() -> None:
    key = Key("all_gather_matmul", 2, contracts=(False,))
    check(both(lambda rank, peer: gated(rank, peer, True), key))
    with pytest.raises(ScheduleError, match=r"LANDING@\d"):
        check(both(lambda rank, peer: gated(rank, peer, False), key))


def opaque(rank: int, peer: int, waits: bool = True) -> list[Step]:
    """Return a complete exchange in one step: both ranks push, signal and wait inside it, which is not a cycle."""
    wait = Wait(queue=COMPUTE, flag=ready(rank, peer))
    return [
        Opaque(
            queue=COMPUTE,
            name="exchange",
            reads=(Region(Buf.INPUT, rank, rank), Region(Buf.LANDING, rank, peer)),
            writes=(Region(Buf.LANDING, peer, rank), Region(Buf.OUTPUT, rank, rank), Region(Buf.OUTPUT, rank, peer)),
            waits=(wait,) if waits else (),
            signals=(Signal(queue=COMPUTE, flag=ready(peer, rank)),),
        )
    ]


def test_opaque_steps_exchange_inside() -> None:
    check(both(opaque))
    with pytest.raises(ScheduleError, match="exchange"):
        check(both(lambda rank, peer: opaque(rank, peer, waits=False)))


def test_opaque_steps_do_not_free_a_slot_by_themselves() -> None:
    with pytest.raises(ScheduleError) as error:
        check_sequence([both(opaque)] * 2, epochs=[1, 3])
    assert error.value.rule == "slot reuse"


def test_messages_say_who_and_what() -> None:
    with pytest.raises(
        ScheduleError, match=r"^\[join\] rank 1 step 0 \(COPY: Copy INPUT@1\[1\] -> LANDING@0\[1\]\) may still run"
    ):
        check(edited(4, replace(both(gather)[1].steps[4], after=())))
