"""A rank that can start no further thread: calls end with an error that says so, and leave nothing behind."""

from __future__ import annotations

import pytest

from tests.harness.outcomes import observe_ranks

from . import rank_thread_limits

pytestmark = pytest.mark.tier("test")

SECONDS = 90.0
RANKS = rank_thread_limits.__name__


def test_a_collective_ends() -> None:
    """Its copies were queued for a thread that did not exist, and its end waited for them."""
    first, second = (outcome.value for outcome in observe_ranks(f"{RANKS}:collective", 2, timeout=SECONDS))
    assert first[0]["error"] == "UbOverlapError" and "a thread that copies for peers cannot be started" in first[0]["text"]
    assert first[0]["seconds"] < 20, first
    assert first[1]["error"] == "SessionPoisonedError", first
    assert (second[0]["error"], second[0]["ranks"]) == ("PeerFailedError", (0,)), second
    assert "cannot be started" in second[0]["text"]


def test_a_refused_message_is_not_sent() -> None:
    """The messages after it arrive whole, in order."""
    refused, received = (outcome.value for outcome in observe_ranks(f"{RANKS}:message", 2, timeout=SECONDS))
    assert refused["error"] == "UbOverlapError" and "a thread that sends or receives cannot be started" in refused["text"]
    assert received == [[222.0], [333.0]]


def test_peers_are_not_blamed() -> None:
    """A rank that has no thread for a request to the Store says so."""
    found = observe_ranks(f"{RANKS}:request_of_the_store", 2, timeout=SECONDS, wait_for=(0,))[0].value
    assert found["error"] == "UbOverlapError" and found["ranks"] is None, found
    assert "cannot be started" in found["text"] and found["seconds"] < 20
