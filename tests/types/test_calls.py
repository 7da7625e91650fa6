"""Type checkers know the public functions: pyrefly accepts right calls and rejects wrong ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import ub_overlap
from tests.harness.ranks import PATIENCE_S
from ub_overlap.compiler.options import NAMES, OptionValues, options
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.settings import Settings, SettingValues

CALLS = Path(__file__).parent / "calls.py"
PYREFLY = shutil.which("pyrefly", path=str(Path(sys.executable).parent)) or shutil.which("pyrefly")


@pytest.mark.tier("test")
@pytest.mark.skipif(PYREFLY is None, reason="no pyrefly: make lint installs it")
def test_calls_as_a_type_checker_sees_them(tmp_path: Path) -> None:
    (tmp_path / "pyrefly.toml").write_text("")
    copy = shutil.copy(CALLS, tmp_path)
    command = [
        str(PYREFLY), "check", copy, "--config", str(tmp_path / "pyrefly.toml"), "--python-interpreter-path", sys.executable,
        "--search-path", str(Path(ub_overlap.__file__).parents[1]), "--output-format", "json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    errors = {e["line"]: e["description"] for e in json.loads(done.stdout)["errors"] if e["severity"] == "error"}
    wrong = {number for number, line in enumerate(CALLS.read_text().splitlines(), 1) if line.endswith("# error")}
    assert len(wrong) == 9 and {n: text for n, text in errors.items() if n not in wrong} == {}
    assert wrong - errors.keys() == set(), "lines that the type checker accepts"


def test_type_checkers_know_every_option_and_setting() -> None:
    assert tuple(OptionValues.__annotations__) == NAMES
    known, real = get_type_hints(SettingValues), get_type_hints(Settings)
    assert list(known) == list(real)
    assert {name for name in real if known[name] != real[name]} == {"flight_dir"}, "a path, kept as text"


def test_options_are_a_dict_that_is_checked_at_once() -> None:
    given = options(overlap="force", fp8="all", max_autotune=True)  # type: ignore[call-arg]  (Inductor's)
    assert given == {"overlap": "force", "fp8": "all", "max_autotune": True}
    with pytest.raises(OptionError, match="(?s)unknown option 'overlp'.*did you mean overlap"):
        options(overlp="force")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="bad value of option 'min_bytes'"):
        options(min_bytes=-1)
