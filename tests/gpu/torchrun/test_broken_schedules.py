"""Run schedules with a Wait or a Signal removed: the race test must notice, else it could not fail.

The hook by which C++ asks for schedules is replaced, so the proof is skipped. Each test breaks one step and fails
if nothing notices.

    without a READY wait    idle copies delay the peer's piece: rank 0 computes with stale data
    without a DONE wait     rank 1 ignores DONE and runs ahead; rank 0 reads slowly and is overwritten, or clears a READY of the
                            next call
    without a signal        its receiver raises PeerTimeoutError
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.gpu import cases
from tests.gpu.lockstep import Lockstep
from tests.gpu.torchrun.test_races import VERSIONS, Site, sites
from tests.schedule.mutations import delete
from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.schedule.effects import accesses, show
from ub_overlap.runtime.schedule.encode import decode, encode
from ub_overlap.runtime.schedule.encode import provide as proven
from ub_overlap.runtime.schedule.steps import Compute, Copy, FlagKind, Key, Queue, Region, Schedule, Signal, Step, Wait
from ub_overlap.runtime.session import session

Edit = Callable[[Schedule], Schedule]
DEADLINE_S = 1.5


def use(edit: Edit | None) -> None:
    """Provide proven schedules changed by `edit`, from now on. None: unchanged."""
    if edit is None:
        ops.extension().set_provider(ops.ScheduleProvider())
        return

    def provide(key: tuple[Any, ...], rank: int) -> list[tuple[int, ...]]:
        return encode(edit(decode(proven(key, rank), Key(*key), rank)))

    ops.extension().set_provider(provide)


def schedule_of(site: Site, rank: int) -> Schedule:
    """Return the proven schedule of a site. The key is recorded during a call."""
    return decode(proven(KEYS[site.name], rank), Key(*KEYS[site.name]), rank)


KEYS: dict[str, tuple[Any, ...]] = {}


def learn(lockstep: Lockstep, group: str, kind: str) -> Site:
    """Return a site with its expected results and its key."""
    asked: list[tuple[Any, ...]] = []
    provider = ops.ScheduleProvider()

    def listen(key: tuple[Any, ...], rank: int) -> list[tuple[int, ...]]:
        asked.append(key)
        return provider(key, rank)

    ops.extension().set_provider(listen)
    (site,) = sites(lockstep, group, [kind], 256 if lockstep.cuda else 64)
    KEYS[site.name] = asked[-1]
    return site


def place_of(schedule: Schedule, step: Step) -> int:
    return next(i for i, other in enumerate(schedule.steps) if other == step)


def insert(schedule: Schedule, place: int, steps: list[Step]) -> Schedule:
    return replace(schedule, steps=(*schedule.steps[:place], *steps, *schedule.steps[place:]))


def held_up(schedule: Schedule, wait: Wait, copies: int) -> Schedule:
    """Return the sender's schedule with idle copies before the push that `wait` awaits: into its own shard of its landing area,
    which no step reads."""
    signal = next(i for i, s in enumerate(schedule.steps) if isinstance(s, Signal) and s.flag == wait.flag)
    matmul = next((i for i, s in enumerate(schedule.steps) if isinstance(s, Compute) and s.writes[0].buf.in_arena), signal)
    if matmul < signal and wait.flag.kind is FlagKind.READY:  # a direct call: nothing is in its own landing area yet
        own = schedule.steps[matmul].writes[-1]
        return insert(schedule, matmul, [Copy(queue=Queue.COMPUTE, src=own, dst=own)] * copies)
    push = schedule.steps[signal - 1]
    assert isinstance(push, Copy), f"expected a push before {show(schedule.steps[signal])}, got {show(push)}"
    me = schedule.rank
    own = Region(push.src.buf, me, me)
    idle = Copy(queue=Queue.COPY, src=own, dst=Region(push.dst.buf, me, me))
    return insert(schedule, signal - 1, [replace(idle, after=push.after), *[idle] * (copies - 1)])


def slow_reader(schedule: Schedule, times: int) -> Schedule:
    """Return the schedule with its last arena read repeated."""
    place = max(
        i
        for i, step in enumerate(schedule.steps)
        if any(a.region.buf.in_arena and not a.write for a in accesses(step, schedule.rank))
        and not getattr(step, "accumulate", 0)
    )
    return insert(schedule, place, [replace(schedule.steps[place], after=(), record=None)] * times)


def wrong_calls(lockstep: Lockstep, group: str, site: Site, calls: int, in_step: bool) -> list[int]:
    """Return the calls whose bits differ from the proven schedule. `in_step`: barrier before each call."""
    found = []
    for call in range(calls):
        version = (call * 2 + call // 3) % VERSIONS  # differs from the version two calls before, which used the slot
        if in_step:
            lockstep.sync()
            lockstep.barrier()
        case = site.versions[version]
        found.append(cases.differs(cases.run_op(case, site.strategy, group, site.name), site.expected[version]))
    lockstep.sync()
    return [call for call, wrong in enumerate(found) if bool(wrong)]


def without_ready(lockstep: Lockstep, group: str, site: Site, wait: Wait) -> str:
    def edit(schedule: Schedule) -> Schedule:
        if schedule.rank == wait.flag.source:
            return held_up(schedule, wait, 4000 if lockstep.cuda else 20000)
        return delete(schedule, place_of(schedule, wait)) if schedule.rank == 0 else schedule

    use(edit)
    try:
        wrong = wrong_calls(lockstep, group, site, VERSIONS, in_step=True)
    finally:
        use(None)
        lockstep.barrier()
    if lockstep.rank == 0 and not wrong:
        raise AssertionError(f"missed: without {show(wait)} rank 0 still computes the right numbers")
    return f"caught: wrong numbers in {len(wrong)} of {VERSIONS} calls"


def without_done(lockstep: Lockstep, group: str, kind: str, waits: bool) -> str:
    """Rank 1 never sees DONE signals, with or without its wait for rank 0's slot."""
    site = learn(lockstep, group, kind)

    def edit(schedule: Schedule) -> Schedule:
        if schedule.rank == 0:
            return slow_reader(schedule, 1000)
        if schedule.rank != 1:
            return schedule
        for step in schedule.steps:
            if isinstance(step, Wait) and (step.back == 0 or (step.flag.source == 0 and not waits)):
                schedule = delete(schedule, place_of(schedule, step))
        return schedule

    before = settings.current().step_timeout_s
    if not waits:  # rank 1 runs ahead: rank 0 may clear its READY with those of the earlier call, and then waits for it
        settings.configure(step_timeout_s=2 * DEADLINE_S)
    use(edit)
    note = ""
    try:
        calls = 12
        wrong = wrong_calls(lockstep, group, site, calls, in_step=False)
        note = f"wrong numbers in {len(wrong)} of {calls} calls" if wrong else ""
        session.check(group)
    except errors.UbOverlapError as error:
        note = f"{type(error).__name__}: {error.what}"
    finally:
        use(None)
        settings.configure(step_timeout_s=before)
        lockstep.barrier()
    if lockstep.rank != 0:
        return ""
    if waits and note:
        raise AssertionError(f"with all its waits for free slots: {note}")
    if not waits and not note:
        raise AssertionError("missed: without the wait for a free slot rank 0 still computes the right numbers")
    return "all is well with it" if waits else f"caught: {note}"


def without_signal(lockstep: Lockstep, group: str, kind: str, kind_of_flag: FlagKind) -> str:
    """Rank 1 omits its last signal of a kind to rank 0."""
    site = learn(lockstep, group, kind)
    schedule = schedule_of(site, 1)
    gone = [s for s in schedule.steps if isinstance(s, Signal) and s.flag.kind is kind_of_flag and s.flag.rank == 0][-1]
    before = settings.current().step_timeout_s
    settings.configure(step_timeout_s=DEADLINE_S)
    use(lambda s: delete(s, place_of(s, gone)) if s.rank == 1 else s)
    lockstep.barrier()
    clock, found = time.monotonic(), None
    try:
        for version in range(4):
            cases.run_op(site.versions[version], site.strategy, group, site.name)
        lockstep.sync()
        session.check(group)
    except errors.UbOverlapError as error:
        found = error
    finally:
        use(None)
        settings.configure(step_timeout_s=before)
        seconds = time.monotonic() - clock
        lockstep.barrier()
    if lockstep.rank == 0 and found is None:
        raise AssertionError(f"missed: rank 0 does not notice that {show(gone)} is not sent")
    if lockstep.rank == 0 and not isinstance(found, errors.PeerTimeoutError):
        # The named rank depends on who waited first: a rank whose signal is lost waits for others too.
        raise AssertionError(f"expected PeerTimeoutError, got {type(found).__name__}: {found}")
    return f"caught after {seconds:.1f} s: {type(found).__name__} naming {getattr(found, 'ranks', ())}"


def waits_of(schedule: Schedule, quick: bool) -> list[Wait]:
    """Return its waits for this call's data. `quick`: the first and last of each flag kind."""
    every = [s for s in schedule.steps if isinstance(s, Wait) and s.back == 0]
    if not quick:
        return every
    kinds = {wait.flag.kind for wait in every}
    return [
        w
        for kind in sorted(kinds)
        for of in [[w for w in every if w.flag.kind is kind]]
        for w in dict.fromkeys((of[0], of[-1]))
    ]


DATA_KINDS = ("AG2", "AG", "RS", "RS direct", "AR", "AR direct", "bulk", "bulk RS")
SLOT_KINDS = ("AG2", "RS", "RS direct", "AR", "bulk", "bulk RS")
SIGNALS = {
    "AG2": (FlagKind.READY, FlagKind.DONE),
    "RS": (FlagKind.READY, FlagKind.DONE),
    "RS direct": (FlagKind.READY, FlagKind.DONE),
    "AR": tuple(FlagKind),
    "bulk": (FlagKind.READY, FlagKind.DONE),
    "bulk RS": (FlagKind.READY,),
}


def full_unless(quick: bool) -> Any:
    return [] if quick else pytest.mark.full


@pytest.mark.deadline(240)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=full_unless(k in ("AG2", "RS", "RS direct", "AR"))) for k in DATA_KINDS]
)
def test_every_wait_for_data_is_needed(lockstep: Lockstep, kind: str) -> None:
    """All waits share one group: a missing wait breaks numbers, not the group."""
    group = lockstep.new_group(backend="gloo")
    site = learn(lockstep, group, kind)
    waits = waits_of(schedule_of(site, 0), lockstep.quick)
    for wait in waits:
        lockstep.note(f"without {show(wait)}: {without_ready(lockstep, group, site, wait)}")
    lockstep.close(group)


@pytest.mark.parametrize("waits", [True, False], ids=["with its wait for a free slot", "without its wait for a free slot"])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=full_unless(k in ("AG2", "RS", "RS direct"))) for k in SLOT_KINDS])
def test_a_rank_that_never_signals_done(lockstep: Lockstep, own_group: str, kind: str, waits: bool) -> None:
    lockstep.note(without_done(lockstep, own_group, kind, waits))


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        pytest.param(
            kind,
            flag,
            marks=full_unless(kind in ("AG2", "RS", "RS direct") or (kind == "AR" and flag is FlagKind.READY2)),
            id=f"{kind}-{flag.name}",
        )
        for kind, flags in SIGNALS.items()
        for flag in flags
    ],
)
def test_a_missing_signal(lockstep: Lockstep, own_group: str, kind: str, flag: FlagKind) -> None:
    lockstep.note(without_signal(lockstep, own_group, kind, flag))
