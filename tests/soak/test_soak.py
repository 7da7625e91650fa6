"""Half a minute each of the soak and the fault matrix. By hand they run longer: python -m tests.soak --help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.outcomes import Outcome
from tests.harness.shared_memory import list_segments

from .fault_matrix import Fault, FaultRuns, find_limit, judge, list_faults
from .resources import Resources, find_leaks
from .scene import Seen
from .soak import soak
from .steps import PROGRAMS, RANKS

LEAST_SAMPLES = 12
"""Two samples to each sixth of the soak: find_leaks compares the lowest with the highest of a sixth."""
DEADLINE_S, SPARE_S = 5.0, 4.0
"""The spare seconds are for a busy machine: an error after three deadlines exceeds them, and a death is seen before them."""
FAULTS = (
    "RS: dies SIGKILL",
    "SRS: dies SIGTERM",
    "plain AR: dies SIGKILL",
    "plain AR: orphans SIGKILL",
    "RS direct: dies SIGKILL",
    "AR direct: dies SIGSTOP",
    "bulk: leaves exits",
    "AG: leaves raises",
    "AG: binds compiled",
    "RS: grows grow/1:SIGKILL",
    "RS: starves first:files",
    "RS: starves later:memory",
    "RS: starves late:files",
    "RS: starves first:threads",
    "RS: starves later:threads",
    "RS: shrinks SIGKILL",
    "message: shrinks SIGKILL",
    "compiled step: shrinks SIGSTOP",
    "FSDP2 step: shrinks SIGKILL",
    "DDP step: shrinks SIGKILL",
    "pipeline step: shrinks SIGKILL",
    "AG: binds attached:SIGTERM",
    "bulk: withholds sleeps",
    "split RS: between SIGKILL",
    "A2A rounds: between SIGSTOP",
    "coalesced: between abandons",
    "A2A: dies SIGSTOP",
    "A2A step: between SIGSTOP",
    "A2A order: between SIGKILL",
    "split AR: skips next",
    "message: dies SIGKILL",
    "compiled step: dies SIGKILL",
    "FSDP2 step: leaves raises",
    "DDP step: dies SIGKILL",
    "two hosts: dies SIGKILL",
    "pipeline step: at_message receives gradient 0:SIGSTOP",
    "AG: slow host",
    "RS direct: slow host",
)
"""Those that tests/runtime/test_failures.py does not try, and a late rank. At each message of a pipeline, a death is tried."""
IN_TEST = (
    "pipeline step: at_message receives output 1:SIGKILL",
    "pipeline step: at_message sends gradient 2:SIGKILL",
    "pipeline step: at_message sends output 2:SIGSTOP",
)
CHOSEN = [
    pytest.param(fault, marks=pytest.mark.tier("test")) if fault.name in IN_TEST else fault
    for fault in list_faults("cpu")
    if fault.name in (*FAULTS, *IN_TEST) or (fault.function == "at_message" and fault.is_death)
]


@pytest.mark.tier("full")
@pytest.mark.soak
def test_soak() -> None:
    """Random calls of all ops have right results, and nothing grows."""
    report = soak(2, seed=20, seconds=30.0, least_samples=LEAST_SAMPLES, limit_s=120.0)
    assert report.is_fine, report.describe()
    assert min(map(len, report.samples)) >= LEAST_SAMPLES, report.describe()


@pytest.mark.tier("full")
@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS)
def test_soak_of_a_program(program: str) -> None:
    """Steps of a whole program have right updates, and nothing grows."""
    ranks = RANKS.get(program, 2)
    report = soak(ranks, seed=7, program=program, seconds=15.0, least_samples=LEAST_SAMPLES, limit_s=120.0)
    assert report.is_fine, report.describe()
    assert min(map(len, report.samples)) >= LEAST_SAMPLES, report.describe()


@pytest.mark.tier("full")
def test_a_wrong_step_is_found_and_replays() -> None:
    """A gradient that is off by a hundredth is found, in that step alone."""
    first = soak(2, seed=4, program="DDP step", calls=4, sabotage=2)
    again = soak(2, seed=4, program="DDP step", first=2, calls=1, sabotage=2)
    assert [(number, rank) for number, rank, _ in first.bad] == [(2, 1)], first.describe()
    assert "programs --only 'DDP step' --ranks 2 --seed 4 --first 2 -n 1" in first.describe()
    assert first.bad == again.bad, again.describe()


class _SlowPool:
    """Stands for the ranks of a machine that takes five seconds for a batch. Each batch leaves a file open."""

    now, batches = 0.0, 0

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __enter__(self) -> _SlowPool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, *_: object, **__: object) -> list[dict[str, Any]]:
        type(self).now += 5.0
        type(self).batches += 1
        found = Resources(calls=25 * self.batches, rss=200 << 20, fds=16 + self.batches, maps=400, threads=6)
        return [{"bad": [], "broken": False, "resources": found}] * self.ranks


def test_a_leak_is_found_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak goes on until it has the samples that show a leak, at most to its limit, and says where they are too few."""
    monkeypatch.setattr(_SlowPool, "now", 0.0)
    monkeypatch.setattr(_SlowPool, "batches", 0)
    monkeypatch.setattr("tests.soak.soak.RankPool", _SlowPool)
    monkeypatch.setattr("tests.soak.soak.time", SimpleNamespace(monotonic=lambda: _SlowPool.now))
    report = soak(2, seed=1, seconds=20.0, least_samples=LEAST_SAMPLES, limit_s=120.0)
    assert [len(samples) for samples in report.samples] == [24, 24], "something grows, so it goes on to the limit"
    assert "fds grew from" in report.describe() and not report.is_fine
    report = soak(2, seed=1, seconds=20.0, limit_s=120.0)
    assert [len(samples) for samples in report.samples] == [4, 4], "no samples are asked for"
    report = soak(2, seed=1, seconds=20.0, least_samples=LEAST_SAMPLES, limit_s=25.0)
    assert [len(samples) for samples in report.samples] == [5, 5]
    assert "rank 1: 5 samples show no leak; it takes 6" in report.describe()


@pytest.mark.tier("full")
def test_a_wrong_result_is_found_and_replays() -> None:
    """The soak finds a result that was changed, of an all_to_all, names its call, and finds it again in that call alone."""
    first = soak(2, seed=4, first=20, calls=8, sabotage=24)
    assert [(number, rank) for number, rank, _ in first.bad] == [(24, 1)], first.describe()
    assert "start_all_to_all" in first.describe() and "--seed 4 --first 24 -n 1" in first.describe()
    again = soak(2, seed=4, first=24, calls=1, sabotage=24)
    text = [bad[2].partition(": error")[0] for bad in (*first.bad, *again.bad)]
    assert text[0] == text[1], "the same op on the same sizes"


@pytest.mark.parametrize("name", ["rss", "fds", "maps", "threads"])
def test_growth_is_found(name: str) -> None:
    """A steady growth is found, a large warm-up and a peak are not."""

    def sample(i: int, grown: bool) -> Resources:
        values = {"rss": 200 << 20, "fds": 16, "maps": 400, "threads": 6}
        step = {"rss": 1 << 20, "maps": 2}.get(name, 1)
        values[name] += step * i if grown else step * min(i, 5) + (step if i == 20 else 0)
        return Resources(calls=i, **values)

    assert not find_leaks([sample(i, False) for i in range(30)])
    found = find_leaks([sample(i, True) for i in range(30)])
    assert len(found) == 1, found
    assert found[0].startswith(f"{name} grew from")


@pytest.fixture(scope="module")
def fault_runs(request: pytest.FixtureRequest) -> Iterator[FaultRuns]:
    """Run the selected faults, two at a time."""
    chosen = [item.callspec.params["fault"] for item in request.session.items if item.function is test_fault]  # type: ignore[attr-defined]
    before = list_segments()
    runs = FaultRuns(chosen, "cpu", 2, DEADLINE_S, 2, SPARE_S)
    yield runs
    runs.close()
    assert list_segments() <= before, "trials left shared memory open"


@pytest.mark.tier("full")
@pytest.mark.soak
@pytest.mark.parametrize("fault", CHOSEN, ids=lambda fault: fault.name)
def test_fault(fault_runs: FaultRuns, fault: Fault) -> None:
    wrong, _ = fault_runs.result(fault)
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["split RS: between SIGKILL", "A2A rounds: between SIGSTOP", "coalesced: between abandons"])
def test_a_late_error_is_found(name: str) -> None:
    """An error after twice the deadline is in time, one after three deadlines is not, whatever a busy machine adds."""
    (fault,) = (fault for fault in list_faults("cpu") if fault.name == name)
    limit_s = find_limit(fault, DEADLINE_S, SPARE_S)
    for deadlines, wrong in ((2.0, ""), (3.0, "raised after 15.0 s")):
        seen = Seen(fault.errors[0], (1,), "rank 1 of the group", deadlines * DEADLINE_S, fault.errors[0], "right")
        assert judge(fault, Outcome(0, value=asdict(seen)), limit_s, 1, cuda=False) == wrong


def test_the_chosen_faults_exist() -> None:
    names = [fault.name for fault in list_faults("cpu")]
    assert {*FAULTS, *IN_TEST} <= set(names)
    assert len(names) == len(set(names)), "two faults have one name"
