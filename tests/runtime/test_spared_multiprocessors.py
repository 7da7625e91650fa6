"""Multiprocessors that matmuls leave to NCCL: while a collective is open, unless the program has set a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import errors, settings
from ub_overlap.runtime.ops.spared_multiprocessors import spare


@pytest.fixture
def carveout() -> Iterator[Callable[[], int | None]]:
    """Return torch's carve-out, which is none before and after."""
    assert compat.get_carveout() is None
    before = settings.current().nccl_multiprocessors
    yield compat.get_carveout
    spare(False)
    compat.set_carveout(None)
    settings.configure(nccl_multiprocessors=before)


def test_while_a_collective_is_open(carveout: Callable[[], int | None]) -> None:
    seen = []
    for is_open in (False, True, True, False, False, True, False):
        spare(is_open)
        seen.append(carveout())
    assert seen == [None, 8, 8, None, None, 8, None]


def test_the_setting(carveout: Callable[[], int | None]) -> None:
    """A number that changes meanwhile is taken back as it was set."""
    settings.configure(nccl_multiprocessors=20)
    spare(True)
    settings.configure(nccl_multiprocessors=0)
    assert carveout() == 20
    spare(False)
    assert carveout() is None
    spare(True)
    assert carveout() is None
    with pytest.raises(errors.OptionError, match="nccl_multiprocessors"):
        settings.configure(nccl_multiprocessors=-1)


def test_a_number_of_the_program_stays(carveout: Callable[[], int | None]) -> None:
    compat.set_carveout(3)
    spare(True)
    assert carveout() == 3
    spare(False)
    assert carveout() == 3
    compat.set_carveout(None)
    spare(True)
    compat.set_carveout(5)  # while a collective is open
    spare(False)
    assert carveout() == 5
