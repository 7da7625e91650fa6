"""Processes of ranks are like new ones: variables of the test, sessions of their own, hash seeds that differ."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import rank_processes, ranks
from tests.harness.outcomes import observe_ranks
from tests.harness.processes import READ_AT_IMPORT, kill_process, start_process
from tests.harness.ranks import WAIT_S, RankDied, RankError, RankPool

pytestmark = pytest.mark.tier("test")

FUNCTION = f"{rank_processes.__name__}:state"


def test_new_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):  # the servers of the first call have other variables
        monkeypatch.setenv("UB_OVERLAP_TEST_VARIABLE", value)
        zero, one = (outcome.value for outcome in observe_ranks(FUNCTION, 2))
        assert zero["hash"] != one["hash"], "a plan that depends on the order of a set is equal on these ranks"
        for found in (zero, one):
            assert found["imported"] == ["torch"] and found["session"] and found["threads"] == "1"
            assert found["variable"] == value
    monkeypatch.delenv("UB_OVERLAP_TEST_VARIABLE")
    assert observe_ranks(FUNCTION, 1)[0].value["variable"] is None


def test_kill_of_a_process() -> None:
    """A process is gone when kill_process returns, also one that has just started."""
    process = start_process(0, time.sleep, (60.0,), {**os.environ, **READ_AT_IMPORT})
    kill_process(process)
    assert process.exitcode == -9 and not os.path.exists(f"/proc/{process.pid}/exe")


def test_pools_after_errors() -> None:
    """Ranks serve on after an error that all of them raise, and end where a group is broken: the next test has new ones."""
    with RankPool(2) as pool:
        pool.run(rank_processes.state)
        for kind, stays in (("argument", True), ("from", False), ("poisoned", False)):
            before = pool.pids
            with pytest.raises(RankError):
                pool.run(rank_processes.fail, kind)
            assert pool.pids == (before if stays else [])


def test_settings_of_a_job_end_with_it() -> None:
    with RankPool(2) as pool:
        first, second = (pool.run(rank_processes.configure, 2.0) for _ in range(2))
        assert first == second == [WAIT_S] * 2


def text_of_failure(kind: type[Exception], function: Callable[..., Any]) -> str:
    """Return the text of the error with which ranks that have run another function before fail. They are new ones then."""
    with RankPool(2) as pool:
        pool.run(rank_processes.configure, 2.0)
        with pytest.raises(kind) as caught:
            pool.run(function)
        assert not pool.pids
    text = str(caught.value)
    assert text.endswith(f"run before: {rank_processes.__name__}:configure")
    return text


def test_stacks_of_a_dead_rank() -> None:
    """The error names the line of a rank that a signal has ended, and what its process ran before."""
    text = text_of_failure(RankDied, rank_processes.die)
    assert "process of rank 1 of 2 ended with code -6" in text and "Fatal Python error: Aborted" in text
    assert "rank_processes.py" in text and " in die" in text


def test_stacks_of_a_thread_without_python() -> None:
    """A thread of C++ that crashed has its stack in the error: Python's own stacks do not name it."""
    text = text_of_failure(RankDied, rank_processes.crash)
    assert "process of rank 1 of 2 ended with code -11" in text and "Fatal Python error: Segmentation fault" in text
    assert "SIGSEGV" in text and "atoi" in text and "epoll_wait" not in text  # gloo's thread: not this one


def test_stacks_of_a_rank_that_waits_for_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the line where it waits, and what the ranks ran before: that may have left their group out of step."""
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    text = text_of_failure(RankError, rank_processes.fail_alone)
    assert "rank 1 of 2 raised ValueError" in text and "ranks [0] did not finish within 0.5 s" in text
    assert " in fail_alone" in text.partition("did not finish")[2]


def test_an_error_of_several_ranks_is_printed_once() -> None:
    """One traceback for what ranks raised in one place, and the messages of the others. An error elsewhere has its own."""
    failures = {rank: _failure("guess", f"rank {rank} is off") for rank in range(3)} | {3: _failure("other", "elsewhere")}
    text = str(RankError(4, failures, [], ""))
    assert text.count("Traceback") == 2 and text.count("in guess") == 1
    assert "ranks 0, 1, 2 of 4 each raised ValueError" in text and "rank 3 of 4 raised ValueError" in text
    assert all(f"rank {rank} is off" in text for rank in range(3))


def _failure(function: str, message: str) -> tuple[str, str, str]:
    where = f'  File "a.py", line 3, in {function}\n    raise ValueError\n'
    text = f"Traceback (most recent call last):\n{where}ValueError: {message}\n"
    return "ValueError", message, text
