"""Shared memory of sessions: nothing outlives its processes, sizes are checked, and a destroyed group gives it back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from tests.harness.shared_memory import list_processes_with_mappings
from tests.harness.tiers import in_full
from ub_overlap.runtime.session.host import host_id
from ub_overlap.runtime.session.topology import Topology, choose_transport

from . import rank_memory

pytestmark = pytest.mark.tier("test")


@pytest.mark.parametrize("topic", ["grow/", "grown/"])
def test_killed_while_growing(topic: str) -> None:
    """Nothing of a growth remains when a rank is killed in it: neither of the dead rank nor in the survivor."""
    survivor = observe_ranks("tests.runtime.rank_memory:killed_growing", 2, args=(topic,))[0].value
    assert (survivor["error"], survivor["ranks"]) == ("PeerTimeoutError", (1,)), survivor
    assert "rank 1 of the group is gone" in survivor["text"]
    assert survivor["seconds"] < 20
    assert survivor["after"] == survivor["before"] > 0
    assert survivor["open"] == set()
    assert len(survivor["processes"]) == 1
    assert not list_processes_with_mappings(survivor["segments"]), "the survivor's memory outlived it"


def test_a_peer_that_cannot_be_reached() -> None:
    """All ranks run plain collectives, with the reason of one of them."""
    values = [outcome.value for outcome in observe_ranks("tests.runtime.rank_memory:unreachable", 2)]
    assert [value["bad"] for value in values] == [[], []]
    assert {value["transport"] for value in values} == {"c10d"}
    assert len({value["reason"] for value in values}) == 1
    assert "its rank 0 cannot map the memory of rank 1 (cannot open /proc/" in values[0]["reason"]
    assert "Permission denied" in values[0]["reason"]
    assert values[0]["open"] == []


def test_interrupted_allocation(pools: dict[int, RankPool]) -> None:
    """Signals delay an allocation, and end it only after the deadline."""
    for bad, found in pools[2].run(rank_memory.interrupted):
        assert bad == []
        assert found["error"] == "ArenaError", found
        assert "signals that interrupt each attempt" in found["text"]
        assert 1.9 < found["seconds"] < 20


def test_addresses(pools: dict[int, RankPool]) -> None:
    for reasons, good, closed, error in pools[2].run(rank_memory.addresses):
        assert "No such file" in reasons.pop(2)
        assert all("is not the memory that the peer made" in reason for reason in reasons), reasons
        assert good == ""
        assert closed != "", "a segment is open for as long as its rank shares it"
        assert error == "ArenaError"


def test_limits_of_a_segment(pools: dict[int, RankPool]) -> None:
    """Its size is sealed, only its user may open it, and neither programs nor forked children inherit it."""
    assert pools[2].run(rank_memory.limits_of_a_segment) == [([], "0o600", False, 0)] * 2


def test_released_at_destroy() -> None:
    """Also after a failure, which keeps the session for its error text."""
    for outcome in observe_ranks("tests.runtime.rank_memory:released_at_destroy", 2):
        value = outcome.value
        assert value["bad"] == []
        assert value["failed"] == "ShapeMismatchError"
        before, bound, failed, after = value["bytes"]
        assert before == after < bound == failed, value


# ---- hosts ------------------------------------------------------------------------------------------------------------------

HOST = "node:boot;pid namespaces=pid:[1];time namespaces=time:[1]"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (HOST, ""),
        (HOST.replace("pid:[1]", "pid:[2]"), "one host, node, but different pid namespaces"),
        (HOST.replace("time:[1]", "time:[2]"), "one host, node, but different time namespaces"),
        (HOST.replace("[1]", "[2]"), "one host, node, but different pid namespaces and time namespaces"),
        (HOST.replace("boot", "boot2"), "2 hosts: node"),
        (HOST.replace("node", "other"), "2 hosts: node, other"),
    ],
)
def test_what_ranks_must_share(other: str, reason: str) -> None:
    found = choose_transport(Topology(hosts=(HOST, other)))
    assert found.transport == ("c10d" if reason else "shared memory")
    assert found.reason == (f"its ranks do not share memory ({reason})" if reason else "")


@pytest.mark.parametrize(
    ("flags", "differing"), [in_full((["-i"], "")), (["-p"], "pid namespaces"), in_full((["-T"], "time namespaces"))]
)
def test_host_id_in_a_namespace(flags: list[str], differing: str) -> None:
    """Ranks in pid or time namespaces of their own are distinguished; IPC namespaces do not matter."""
    program = "from ub_overlap.runtime.session.host import host_id; print(host_id('cpu'))"
    command = [sys.executable, "-c", program]
    apart = subprocess.run(["unshare", *flags, "-f", *command], capture_output=True, text=True, timeout=60)
    if "unshare" in apart.stderr:
        pytest.skip(f"no permission to create a namespace: {apart.stderr.strip()}")
    reason = choose_transport(Topology(hosts=(host_id("cpu"), apart.stdout.strip()))).reason
    assert reason.endswith(f"but different {differing})") if differing else not reason, reason
