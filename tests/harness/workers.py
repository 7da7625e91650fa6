"""Distribution of tests to the workers of pytest-xdist. tests/conftest.py imports the hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

WHEELS = "tests/test_install.py"
"""A file in `tests` whose tests share what they build."""


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be absent
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run all tests of a run of one scope, in their order: the order of tiers (tier_hooks.py) is kept."""
    from xdist.scheduler import LoadScopeScheduling

    class LoadFiles(LoadScopeScheduling):
        def schedule(self) -> None:
            if self.collection is None:
                self._runs = number_runs(next(iter(self.registered_collections.values())))
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self._runs[nodeid]

    config.option.loadscopereorder = False
    return LoadFiles(config, log)


def number_runs(nodeids: Sequence[str]) -> dict[str, str]:
    """Return the run of each test: "3 tests/some/test_a.py" for tests of one scope that follow each other.

    A file whose tests are of several tiers has several runs.
    """
    runs, number, scope = {}, 0, ""
    for nodeid in nodeids:
        if (found := scope_of(nodeid)) != scope:
            number, scope = number + 1, found
        runs[nodeid] = f"{number} {scope}"
    return runs


def scope_of(nodeid: str) -> str:
    """Return the name of a test's scope: its file, as tests of a file share ranks and models; all tests on GPUs are one.

    A test of a file in `tests` itself is alone: most run programs, in processes of their own.
    """
    file = nodeid.partition("::")[0]
    if file.startswith("tests/gpu/"):
        return "tests/gpu"
    return nodeid if file.count("/") == 1 and file != WHEELS else file
