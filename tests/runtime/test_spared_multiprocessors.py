"""Multiprocessors that matmuls leave to NCCL: while a collective is open, unless the program has set a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.ranks import RankPool
from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import errors, settings
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.session.spared_multiprocessors import most_spared

from . import rank_hosts


@pytest.fixture
def carveout() -> Iterator[Callable[[], int | None]]:
    """Return a function that reads torch's carve-out, which is none before and after."""
    assert compat.get_carveout() is None
    yield compat.get_carveout
    left = compat.get_carveout()
    compat.set_carveout(None)
    assert left is None


def spare(count: int) -> Any:
    share = extension().SparedMultiprocessors()
    share.begin(count)
    return share


def test_until_the_last_collective_ends(carveout: Callable[[], int | None]) -> None:
    first, second, nothing = spare(8), spare(8), spare(0)
    assert carveout() == 8
    first.end()
    assert carveout() == 8
    second.end()
    assert carveout() is None
    first.end()  # again
    nothing.end()
    second.begin(8)  # it has ended
    assert carveout() is None


def test_a_share_that_is_dropped(carveout: Callable[[], int | None]) -> None:
    kept, left = spare(8), spare(8)
    kept.end()
    assert carveout() == 8
    del left
    assert carveout() is None


def test_a_number_of_the_program_stays(carveout: Callable[[], int | None]) -> None:
    compat.set_carveout(3)
    spare(8).end()
    assert carveout() == 3
    compat.set_carveout(None)
    share = spare(8)
    compat.set_carveout(5)  # while a collective is open
    share.end()
    assert carveout() == 5
    compat.set_carveout(None)


def test_where_nccl_does_not_run() -> None:
    assert most_spared("no such group", "cpu") == 0
    with pytest.raises(errors.OptionError, match="nccl_multiprocessors"):
        settings.configure(nccl_multiprocessors=-1)


@pytest.mark.tier("full")
def test_collectives_of_ranks(pools: dict[int, RankPool]) -> None:
    """Between start and finish, of collectives with elements; after an exception; after the group has ended or was aborted."""
    for found in pools[2].run(rank_hosts.spares):
        assert found == {
            "open": [8, 8, None],
            "empty": None,
            "left": [8, None],
            "group ended": [8, None],
            "aborted": [8, "GroupAbortedError", None, 0],
        }
