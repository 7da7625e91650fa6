"""A user without a home folder: numeric users of containers have neither HOME nor an entry in passwd."""

from __future__ import annotations

import pwd
from typing import NoReturn

import pytest


def leave_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away the home folder and every variable that replaces it."""

    def unknown_user(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    for name in ("HOME", "UB_OVERLAP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
