"""Mirrored groups on the CPU executor: every op ends, with the results of two processes in the roles of R ranks."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but

from . import rank_mirror


@pytest.mark.parametrize("ranks", full_but([3, 4], [3, 4, 8]))
def test_every_op(pool2: RankPool, ranks: int) -> None:
    assert pool2.run(rank_mirror.every_op, ranks) == [[], []]
    assert pool2.run(rank_mirror.real_group_after) == [[], []]


def test_its_ranks_are_on_no_hosts(pool2: RankPool) -> None:
    """A mirrored group has more ranks than there are: graphs of other groups compile next to it."""
    assert pool2.run(rank_mirror.hosts_of_a_mirror) == [("",), ("",)]


def test_a_process_that_does_not_come_is_reported(pool2: RankPool) -> None:
    found = pool2.run(rank_mirror.lost_process)
    assert "READY" in found[0][0] and found[1] == []
