"""Distribution of tests to the workers of pytest-xdist. tests/conftest.py imports the hook."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be absent
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker whole files, whose tests share ranks and models, and one worker all tests on GPUs."""
    from xdist.scheduler import LoadScopeScheduling

    class LoadFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/gpu" if file.startswith("tests/gpu/") else file

    return LoadFiles(config, log)
