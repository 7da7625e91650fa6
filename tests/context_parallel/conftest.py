"""Options of all these tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.context_parallel.machine import slow_profile


@pytest.fixture(scope="session")
def options() -> dict[str, Any]:
    """Return options by which the exchanges of small models are worth hiding."""
    return {"inner": "aot_eager", "profile": slow_profile(), "min_bytes": 0}
