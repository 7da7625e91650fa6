"""Host waits for the rank's own device: each waits for specific work and has a deadline. Devices are fakes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ub_overlap.runtime import errors, settings
from ub_overlap.runtime.session import device_wait, symm_mem, wait_limit
from ub_overlap.runtime.session.abort_signal import AbortSignal

STEP = 0.2


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a short deadline, and fail on a wait for the whole device, which has no deadline."""

    def refused() -> None:
        raise AssertionError("a wait for the whole device")

    monkeypatch.setattr(torch.cuda, "synchronize", refused)
    before = settings.current().step_timeout_s
    settings.configure(step_timeout_s=STEP)
    yield
    settings.configure(step_timeout_s=before)


class Event:
    """A fake event that completes at its `passes`-th query."""

    passes = 3

    def __init__(self, enable_timing: bool = False) -> None:
        self.asked = 0

    def record(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked >= self.passes

    def elapsed_time(self, other: Event) -> float:
        return 2.0


def test_a_call_is_timed_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    ran: list[int] = []
    assert device_wait.time_on_stream(lambda: ran.append(1)) == 2000.0
    assert ran == [1]


def test_a_stream_that_does_not_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "passes", 1 << 60)
    begin = time.monotonic()
    with pytest.raises(errors.DeviceTimeoutError, match=r"work issued before a timed call did not end .* 0\.2 s"):
        device_wait.time_on_stream(lambda: None)
    assert time.monotonic() - begin >= STEP


def arena(core: Any, monkeypatch: pytest.MonkeyPatch) -> symm_mem.SymmetricArena:
    """Return an arena of two ranks after its rendezvous."""
    monkeypatch.setattr(symm_mem, "_allocate", lambda size: torch.empty(1))
    monkeypatch.setattr(symm_mem, "refuse_capture", lambda doing: None)
    made = symm_mem.SymmetricArena.__new__(symm_mem.SymmetricArena)
    made._group, made._rank, made._ranks, made._slot_bytes, made.core = "g", 0, 2, 64, core
    made._abort = AbortSignal("g")
    made._split, made._channels = {}, None
    made._retained, made._words, made._data = [], torch.empty(1), torch.empty(1)
    made._words_handle = made._data_handle = "old"
    return made


def core_of(ended: bool, captured: bool = False, free: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        has_ended=lambda: ended, is_captured=captured, can_free=lambda: free, replace=lambda data, slot_bytes, slot: None
    )


def test_growth_waits_for_the_calls_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    arena(core_of(True), monkeypatch).grow_begin(128)
    busy = arena(core_of(False), monkeypatch)
    begin = time.monotonic()
    with pytest.raises(errors.DeviceTimeoutError, match="a call of group 'g', whose landing area is to grow"):
        busy.grow_begin(128)
    assert time.monotonic() - begin >= STEP


@pytest.mark.parametrize(("captured", "free", "kept"), [(False, True, 0), (True, True, 1), (False, False, 1)])
def test_old_slots_go_where_nothing_has_to_be_waited_for(
    captured: bool, free: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old slots are kept while the device is busy and freed at the next growth.

    Freeing torch's symmetric memory waits for the whole device.
    """
    met: list[str] = []

    def rendezvous(tensor: Any, group: str, name: str) -> Any:
        met.append(name)
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr(), tensor.data_ptr()])

    monkeypatch.setattr(symm_mem, "_outside_pools", lambda body, abort: body())
    monkeypatch.setattr(symm_mem._torch_compat, "symmetric_rendezvous", rendezvous)
    one = arena(core_of(True, captured, free), monkeypatch)
    one.grow_begin(128)
    one.grow_attach(1, one.data_address)
    one.grow_commit()
    assert (one.slot_bytes, len(one._retained), met) == (128, kept, [""])
    one.core = core_of(True, captured)
    one.grow_begin(256)
    one.grow_attach(1, "77:of rank 1")
    one.grow_commit()
    assert len(one._retained) == (2 if captured else 0)
    assert met[1] == f"ub_overlap/rendezvous/{one.data_address.partition(':')[2]}"
    one.core = core_of(True)


def refuses() -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("core", [SimpleNamespace(is_captured=False, can_free=refuses), None], ids=["failed", "unfinished"])
def test_memory_stays_where_the_device_does_not_tell(
    core: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An arena's memory is kept if the device state is unknown. Only the first arena logs the reason."""
    monkeypatch.setattr(symm_mem._process, "has_warned", False)
    monkeypatch.setattr(symm_mem._process, "retained", [])
    words = []
    with caplog.at_level("WARNING", "ub_overlap.runtime.session.symm_mem"):
        for _ in range(2):
            one = arena(core, monkeypatch)
            words.append(one._words)
            assert not one._can_free()
            del one
    assert all(any(word is kept[0] for kept in symm_mem._process.retained) for word in words)
    (said,) = caplog.records
    assert "group 'g'" in said.getMessage() and ("illegal memory access" if core else "did not complete") in said.getMessage()


def test_names_of_meetings() -> None:
    """Ranks with equal exchange counts need no rendezvous name. Other ranks derive one equal, unique name."""
    seen = set()
    for _ in range(2):  # a group that is bound, closed and bound again may have the same counts
        tokens = [f"{count}:{symm_mem.new_rendezvous_token().partition(':')[2]}" for count in (4, 4, 2)]
        names = {symm_mem.rendezvous_name(list(tokens)) for _rank in range(3)}
        assert len(names) == 1
        seen |= names
    assert len(seen) == 2 and "" not in seen
    assert symm_mem.rendezvous_name([symm_mem.new_rendezvous_token() for _ in range(3)]) == ""


FIELDS = {
    "op": "all_gather_matmul", "site": "s", "reporter": "1", "ranks": "1", "phase": "GROUP_LOCK", "chunk": "0",
    "expected_epoch": "7", "observed_epoch": "0", "waited_s": "4", "silent_s": "-1", "dead": "0", "got": "", "expected": "",
    "advice": "",
}  # fmt: skip


@pytest.mark.parametrize("connections", ["", "1", "8"])
def test_group_lock_timeout(connections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error blames the rank's own device, not a peer. With one connection it names CUDA_DEVICE_MAX_CONNECTIONS."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    error = errors.make("DeviceTimeoutError", FIELDS)
    assert isinstance(error, errors.DeviceTimeoutError) and error.ranks == (1,)
    assert error.what.startswith("rank 1 of the group waited for the group's lock on its own device for 4 s")
    assert "all_gather_matmul at site 's'" in error.where and "epoch 7" in error.got and error.expected
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in error.fix) == (connections == "1") and error.fix


@pytest.mark.parametrize(("got", "expected"), [("", ""), ("", "Float [8], tag 0"), ("Float [8], tag 0", "Float [8], tag 0")])
def test_a_message_that_both_ends_issued(got: str, expected: str) -> None:
    """The fix names the hardware queues for such a message only: one that a peer has not issued is not queued."""
    error = errors.make("PeerTimeoutError", {**FIELDS, "phase": "READY", "got": got, "expected": expected})
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=32" in error.fix) == bool(got)


def test_errors_carry_their_ranks() -> None:
    for name in ("PeerTimeoutError", "ShapeMismatchError", "SiteMismatchError", "PeerFailedError", "DeviceTimeoutError"):
        error = errors.make(name, {**FIELDS, "ranks": "2"})
        assert isinstance(error, errors.RankError) and error.ranks == (2,)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.ranks) == (type(error), str(error), (2,))


def test_a_wait_that_ends() -> None:
    asked = iter([False, False, True])
    device_wait.wait_until(lambda: next(asked), "something")


def test_time_in_which_the_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as one second, so that a loop with slow polls ends too."""
    times = iter((0.0, 1000.0, 1002.0, 1004.0, 1006.0))
    monkeypatch.setattr(wait_limit, "time", SimpleNamespace(monotonic=lambda: next(times)))
    limit = wait_limit.WaitLimit(3.0)
    assert [limit.is_over() for _ in range(4)] == [False, False, False, True]


def test_a_result_that_comes_as_a_poll_ends() -> None:
    """It is the result, also where the deadline is over."""

    class Late(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if timeout is not None:
                self.set_result(7)
                raise TimeoutError
            return super().result()

    assert AbortSignal("g").result(Late(), 0.0) == 7
