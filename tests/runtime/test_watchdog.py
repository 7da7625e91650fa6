"""The watchdog logs each failure once, and the error is still raised."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from ub_overlap.runtime import errors
from ub_overlap.runtime.session import watchdog
from ub_overlap.runtime.session.watchdog import Watchdog

from . import rank_initialize as work


class Patient:
    group = "g7"

    def __init__(self, error: errors.UbOverlapError | None = None) -> None:
        self.error, self.asked = error, 0

    def pending_error(self) -> errors.UbOverlapError | None:
        self.asked += 1
        return self.error


def until(condition: object) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


def test_logs_once_with_the_full_text(caplog: pytest.LogCaptureFixture) -> None:
    dog, well, ill = Watchdog(0.01), Patient(), Patient()
    dog.watch(well)
    dog.watch(ill)
    with caplog.at_level(logging.ERROR, "ub_overlap.runtime"):
        assert until(lambda: well.asked > 3)
        assert caplog.records == []
        ill.error = errors.ArenaError("it broke", where="here", fix="mend it")
        assert until(lambda: caplog.records)
        seen = well.asked
        assert until(lambda: well.asked > seen + 5)
    dog.stop()
    (record,) = caplog.records
    assert record.name == "ub_overlap.runtime"
    assert record.getMessage() == f"group 'g7' has failed: ArenaError: {ill.error}"
    assert "mend it" in record.getMessage()


def test_stops_and_starts_again() -> None:
    dog, patient = Watchdog(0.01), Patient()
    dog.watch(patient)
    assert until(lambda: patient.asked)
    dog.stop()
    asked = patient.asked
    time.sleep(0.1)
    assert patient.asked == asked
    dog.watch(patient)
    assert until(lambda: patient.asked > asked)
    dog.stop()


def test_holds_nothing_alive() -> None:
    dog, patient = Watchdog(0.01), Patient()
    dog.watch(patient)
    seen = weakref.ref(patient)
    del patient
    gc.collect()
    assert until(lambda: seen() is None)
    assert until(lambda: dog._thread is None), "the thread ends when there is nothing to watch"


def test_stop_waits_for_memory_that_is_being_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that frees it must not outlive the interpreter."""
    begun, ended = threading.Event(), threading.Event()

    def close() -> None:
        begun.set()
        time.sleep(0.3)
        ended.set()

    core = SimpleNamespace(has_destroyed_groups=lambda: not begun.is_set(), close_destroyed_groups=close)
    monkeypatch.setattr(watchdog, "extension", lambda: core)
    dog, patient = Watchdog(0.01), Patient()
    dog.watch(patient)
    assert begun.wait(10)
    dog.stop()
    assert ended.is_set()


@pytest.mark.tier("test")
@pytest.mark.parametrize("world", full_but([2], [2, 4]))
def test_a_peer_that_gave_up(world: int) -> None:
    """All ranks log a peer's failure, also idle ones. They still raise it later with its class and text."""
    with RankPool(world) as pool:
        for rank, found in enumerate(pool.run(work.watched)):
            assert found["bad"] == []
            (line,) = found["lines"]
            for text in (line, found["raised"]):
                assert "PeerTimeoutError" in text, (rank, text)
                assert "/lonely" in text, (rank, text)
                assert "noticed by rank 0" in text, (rank, text)


@pytest.mark.tier("test")
def test_check_where_all_is_well() -> None:
    with RankPool(2) as pool:  # a separate pool: check() covers all groups, and other tests break theirs
        assert pool.run(work.unpoisoned) == [[]] * 2
