"""A user without a home folder: numeric users of containers have neither HOME nor an entry in passwd."""

from __future__ import annotations

import logging
import os
import pwd
from pathlib import Path
from unittest import mock

import pytest
import torch

import ub_overlap
from tests.compiler.rank_compile import FORCE, build
from tests.harness.ranks import RankPool
from tests.harness.traces import as_loss
from tests.models.compare import uncached
from ub_overlap.cli.info import info
from ub_overlap.compiler.plan.strategy import NONE
from ub_overlap.runtime import plan_store

FOLDERS = ("HOME", "XDG_CACHE_HOME", "UB_OVERLAP_CACHE_DIR")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def no_home() -> mock._patch:
    return mock.patch.dict(os.environ, {k: v for k, v in os.environ.items() if k not in FOLDERS}, clear=True)


def unknown_user(uid: int) -> pwd.struct_passwd:
    raise KeyError(f"getpwuid(): uid not found: {uid}")


def compile_two(rank: int, world: int) -> tuple[int, list[Path], list[str]]:
    """Compile two models without a home. Return the overlapped collectives, the files of the report and the warnings."""
    lines = Lines()
    plan_store.log.addHandler(lines)
    try:
        with no_home(), mock.patch("pwd.getpwuid", unknown_user), uncached():
            for dims in (2, 3):
                case = build(rank, world, "tests.models.megatron", {"dims": dims, "bias": False, "local": 12})
                as_loss(torch.compile(case.module, backend="ub_overlap", options=FORCE)(*case.inputs)).backward()
            report = ub_overlap.reports()
            assert report.diff and report.to_json()
            return sum(d.strategy != NONE for d in report.decisions), report.paths, lines.texts
    finally:
        plan_store.log.removeHandler(lines)


def test_compiling_goes_on_without_a_cache(pool2: RankPool) -> None:
    """Both models are overlapped and reported. One warning per kind of file says that nothing is stored."""
    for overlapped, paths, warnings in pool2.run(compile_two):
        assert overlapped >= 4
        assert paths == []
        assert len(warnings) == 2 and all("no home folder; set UB_OVERLAP_CACHE_DIR" in line for line in warnings)


def test_info_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    with no_home():
        assert info()["reports"] is None
        with pytest.raises(FileNotFoundError, match="set UB_OVERLAP_CACHE_DIR"):
            plan_store.directory()
