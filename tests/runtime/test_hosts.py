"""Groups across hosts: split collectives over c10d, and where hosts come from. Ranks of one machine count as several hosts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import PATIENCE_S, RankPool

from . import rank_hosts

pytestmark = pytest.mark.tier("test")

STEP = 2.5
SLACK = 20.0


def test_any_order(pools: dict[int, RankPool]) -> None:
    """Results of random programs equal fp32 sums bit by bit, also of 16-bit inputs with fp32 results."""
    assert pools[2].run(rank_hosts.run, "random_program", 80, 0, 2) == [[]] * 2


def test_the_collective_runs_between(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_hosts.runs_meanwhile):
        assert found == {"right": True, "open": [1, 0], "calls": 1, "transport": "c10d"}


def test_other_threads_go_on_meanwhile(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_hosts.others_go_on) == [[True, True, True]] * 2


def test_a_slot_has_one_collective_of_either_kind(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_hosts.share_a_slot) == [["OptionError", "", "OptionError", ""]] * 2


def test_several_at_once(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_hosts.several_at_once) == [[]] * 2


def test_misuse_is_named_as_on_our_transport(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_hosts.run, "misuse"):
        assert [one["error"] for one in found] == ["OptionError"] * 7 + [""], found
        texts = [one["text"] for one in found[:3]]
        assert "split slot 0 has no open collective" in texts[0]
        assert "split all_gather at site '/split.0'" in texts[1] and "was started and not finished" in texts[1]
        assert "split slot 0 holds another collective than the one to finish" in texts[2]


def test_in_a_graph(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_hosts.run, "compiled") == [[]] * 2


def test_a_rank_that_dies_between() -> None:
    found = observe_ranks("tests.runtime.rank_hosts:dies_between", 2, args=(100.0,))[0].value
    assert (found["error"], found["ranks"], found["cause"]) == ("PeerTimeoutError", (1,), "RuntimeError"), found
    assert "finish_collective at site '/split.0', group '" in found["text"]
    assert found["seconds"] < SLACK


@pytest.mark.tier("full")
def test_a_rank_that_stays_away(pools: dict[int, RankPool]) -> None:
    """The wait ends at the deadline of a step, and the ranks that wait know who does not."""
    for found in pools[3].run(rank_hosts.stays_away, STEP)[:2]:
        assert (found["error"], found["ranks"], found["left"]) == ("PeerTimeoutError", (2,), 0), found
        assert "did not end within 2.5 s" in found["text"]
        assert STEP * 0.9 < found["seconds"] < 2 * STEP + SLACK


def test_a_wait_that_is_aborted(pools: dict[int, RankPool]) -> None:
    found = pools[2].run(rank_hosts.aborted)[0]
    assert found["error"] == "GroupAbortedError" and "enough" in found["text"], found
    assert "finish_collective at site '/split.0'" in found["text"] and found["seconds"] < 10


def test_a_group_destroyed_with_an_open_collective(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_hosts.freed) == [[1, 0]] * 2


def test_the_process_ends_with_an_open_collective() -> None:
    program = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from ub_overlap.runtime import ops
x = torch.ones(4)
torch.ops.ub_overlap.start_collective(x, "all_reduce", "sum", x.dtype, 0, False, "none", dist.group.WORLD.group_name, "/open")
dist.destroy_process_group()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("declared", "environment", "expected"),
    [
        ("", {}, ("",)),
        ("2", {}, ("0", "0", "1", "1")),
        ("a,b,a,b", {}, ("a", "b", "a", "b")),
        ("", {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "RANK": "{rank}"}, ("0", "0", "1", "1")),
        ("", {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "RANK": "{rank}"}, ("",)),
        ("", {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "8", "RANK": "{rank}"}, ("",)),  # another world's launcher
        ("4", {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "RANK": "{rank}"}, ("0", "0", "0", "0")),
    ],
)
def test_hosts(pools: dict[int, RankPool], declared: str, environment: dict[str, str], expected: tuple[str, ...]) -> None:
    for rank, (found, _) in enumerate(pools[4].run(rank_hosts.layouts, declared, environment)):
        assert found == [expected, expected[::2]][: 2 - rank % 2]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("2", (2, 2)),
        ("a,a,b,b", (2, 2)),
        ("1", None),
        ("4", None),
        ("a,a,a,b", None),
        ("a,b,a,b", None),  # its hosts' ranks are not in a row
        ("", None),
    ],
)
def test_layouts(pools: dict[int, RankPool], declared: str, expected: tuple[int, int] | None) -> None:
    """Where a group has several ranks on each of several hosts. Look-alikes: every second rank, and the first two."""
    for found in pools[4].run(rank_hosts.host_layouts, declared):
        assert found == [expected, *[None] * (len(found) - 1)], found


@pytest.mark.parametrize("declared", ["3", "0,1", "8", "none"])
def test_hosts_that_do_not_fit(pools: dict[int, RankPool], declared: str) -> None:
    for found, text in pools[4].run(rank_hosts.layouts, declared, {}):
        assert found is None and f"'{declared}', 4 ranks" in text and "UB_OVERLAP_HOSTS" in text
