"""Multiprocessors that matmuls leave to NCCL: while a collective is open, unless the program has set a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.harness.ranks import RankPool
from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import errors, settings
from ub_overlap.runtime.ops.spared_multiprocessors import multiprocessors_for, spare

from . import rank_hosts


@pytest.fixture
def carveout() -> Iterator[Callable[[], int | None]]:
    """Return a function that reads torch's carve-out, which is none before and after."""
    assert compat.get_carveout() is None
    yield compat.get_carveout
    left = compat.get_carveout()
    compat.set_carveout(None)
    assert left is None


def token() -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8)


def test_until_the_last_collective_ends(carveout: Callable[[], int | None]) -> None:
    first, second, nothing = token(), token(), token()
    ends = [spare(first, 8), spare(second, 8), spare(nothing, 0)]
    assert carveout() == 8
    ends[0]()
    assert carveout() == 8
    ends[1]()
    assert carveout() is None
    ends[0]()  # again
    spare(nothing, 0)()
    assert carveout() is None


def test_a_token_that_is_freed(carveout: Callable[[], int | None]) -> None:
    """No finish can follow: an exception came in between, or the group has ended."""
    kept, left = token(), token()
    end = spare(kept, 8)
    spare(left, 8)
    end()
    assert carveout() == 8
    del left
    assert carveout() is None


def test_a_number_of_the_program_stays(carveout: Callable[[], int | None]) -> None:
    held = token()
    compat.set_carveout(3)
    spare(held, 8)()
    assert carveout() == 3
    compat.set_carveout(None)
    end = spare(held, 8)
    compat.set_carveout(5)  # while a collective is open
    end()
    assert carveout() == 5
    compat.set_carveout(None)


def test_where_nccl_does_not_run() -> None:
    assert multiprocessors_for("no such group", torch.device("cpu")) == 0
    with pytest.raises(errors.OptionError, match="nccl_multiprocessors"):
        settings.configure(nccl_multiprocessors=-1)


def test_collectives_of_ranks(pools: dict[int, RankPool]) -> None:
    """Between start and finish, of collectives with elements; after an exception in between; after the group has ended."""
    for found in pools[2].run(rank_hosts.spares):
        assert found == {"open": [8, 8, None], "empty": None, "left": [8, None], "group ended": [8, None]}
