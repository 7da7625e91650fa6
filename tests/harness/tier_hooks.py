"""What pytest does with the tiers (tiers.py): select, order, guard, and say that one has outgrown its budget.

tests/conftest.py imports the hooks and the fixture.
"""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import pytest

from tests.harness.seconds import Recorder, load
from tests.harness.tiers import BUDGETS_S, TIERS, tier_of

TOLERANCE = 1.25
IDLE_LOAD = float(os.cpu_count() or 1)
"""Load average above which a machine is busy: the time of a run says nothing about its tier there. Lint alone gives 1 to 2."""
_LOAD = pytest.StashKey[float]()


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier and of the ones before it; all without it")
    parser.addoption("--record", action="store_true", help="store the seconds of each file (tests/harness/seconds.py)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of later tiers, and sort the others: by tier, then by the measured seconds of their files."""
    tiers = {item: TIERS.index(tier_of(item)) for item in items}
    if (chosen := config.getoption("--tier")) is not None:
        last = TIERS.index(chosen)
        config.hook.pytest_deselected(items=[item for item in items if tiers[item] > last])
        items[:] = [item for item in items if tiers[item] <= last]
    stored = load()

    def cost(item: pytest.Item) -> float:  # a file that is not stored is new, and runs early
        of_file = stored.get(item.nodeid.partition("::")[0], {})
        return of_file.get(TIERS[tiers[item]], (0, 0.0))[1]

    items.sort(key=lambda item: (tiers[item], cost(item)))


@pytest.fixture(autouse=True)
def starts_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of the tier `check` that starts a process."""
    if tier_of(request.node) != "check":
        yield
        return

    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail('a test of the tier "check" starts a process; mark it with pytest.mark.tier("test")')

    starts = mock.patch.object(multiprocessing.process.BaseProcess, "start", refuse)
    with starts, mock.patch.object(subprocess.Popen, "__init__", refuse):
        yield


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say that a tier has outgrown its budget, on a machine that was idle when it began."""
    tier = config.getoption("--tier")
    if tier is None or config.stash[_LOAD] > IDLE_LOAD:
        return
    seconds = terminalreporter._session_start.elapsed().seconds
    if seconds > TOLERANCE * BUDGETS_S[tier]:
        terminalreporter.write_line(
            f"tier {tier}: {seconds:.0f} s, over its budget of {BUDGETS_S[tier]} s; CONTRIBUTING.md has the time of each folder"
        )


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tier(name): check, test or full (tests/harness/tiers.py)")
    config.stash[_LOAD] = os.getloadavg()[0]
    if config.getoption("--record"):
        config.pluginmanager.register(Recorder(), "record_seconds")
