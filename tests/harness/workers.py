"""Distribution of tests to the workers of pytest-xdist. tests/conftest.py imports the hook."""

from __future__ import annotations

from typing import Any

import pytest

WHEELS = "tests/test_install.py"
"""A file in `tests` whose tests share what they build."""


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be absent
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run all tests of a scope, in their order."""
    from xdist.scheduler import LoadScopeScheduling

    class LoadFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return LoadFiles(config, log)


def scope_of(nodeid: str) -> str:
    """Return the name of a test's scope: its file, as tests of a file share ranks and models; all tests on GPUs are one.

    A test of a file in `tests` itself is alone: most run programs, in processes of their own. xdist distributes large scopes
    first, so these come last, and no worker is left alone with a long file.
    """
    file = nodeid.partition("::")[0]
    if file.startswith("tests/gpu/"):
        return "tests/gpu"
    return nodeid if file.count("/") == 1 and file != WHEELS else file
