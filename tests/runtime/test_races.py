"""Back-to-back calls under random delays, and proof that the test can fail."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool

from . import rank_failures


@pytest.mark.parametrize(("kind", "world"), [("gather", 2), ("scatter", 2), ("mixed", 2), ("mixed", 3), ("mixed", 4)])
def test_back_to_back(pools: dict[int, RankPool], kind: str, world: int) -> None:
    assert pools[world].run(rank_failures.hammer, kind, 300 if world == 2 else 60, 300) == [[]] * world


def test_slots_are_reused_only_when_read(pools: dict[int, RankPool]) -> None:
    """Waits for free slots protect a late reader. Without them its data is overwritten."""
    assert pools[2].run(rank_failures.without_done, True, 8)[0] == []
    assert pools[2].run(rank_failures.without_done, False, 8)[0], "the missing waits went unseen"
