"""Run the tests of this folder in lockstep on all ranks of torchrun; collect nothing elsewhere.

tests/gpu/test_torchrun.py starts torchrun for each module of this folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.lockstep import Lockstep, is_under_torchrun

collect_ignore_glob = [] if is_under_torchrun() else ["test_*.py"]

_LOCKSTEP: list[Lockstep] = []
_EXIT_CODES: list[int] = []


@pytest.fixture(scope="session")
def lockstep(request: pytest.FixtureRequest) -> Iterator[Lockstep]:
    """This process among the ranks."""
    ranks = Lockstep(request.config.getoption("--device"), request.config.getoption("--quick"))
    ranks.start()
    _LOCKSTEP.append(ranks)
    yield ranks
    ranks.stop()


@pytest.fixture
def group(lockstep: Lockstep) -> str:
    """The process group that tests share."""
    return lockstep.group()


@pytest.fixture
def own_group(lockstep: Lockstep) -> str:
    """A process group (gloo) that the test may leave broken."""
    return lockstep.new_group(backend="gloo")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test in step with the other ranks, within its deadline in seconds (60, or the marker's)."""
    lockstep = pyfuncitem.funcargs.get("lockstep")
    if not isinstance(lockstep, Lockstep):
        return None
    if lockstep.shares_gpu and (unfit := pyfuncitem.get_closest_marker("own_gpus")):
        pytest.skip(f"ranks share a GPU: {unfit.args[0]}")
    marker = pyfuncitem.get_closest_marker("deadline")
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    own_group = pyfuncitem.funcargs.get("own_group", "")
    lockstep.run(pyfuncitem.name, marker.args[0] if marker else 60.0, lambda: pyfuncitem.obj(**arguments), own_group)
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for lockstep in _LOCKSTEP:
        terminalreporter.section(f"measured on {lockstep.ranks} ranks")
        for test, note in lockstep.notes:
            terminalreporter.line(f"{test}: {note}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    _EXIT_CODES.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    if is_under_torchrun() and _EXIT_CODES:
        # Worker threads of gloo and NCCL may not survive the interpreter's end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_EXIT_CODES[-1])
