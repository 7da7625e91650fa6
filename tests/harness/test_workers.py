"""Which worker of pytest-xdist runs a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.harness.ranks import PATIENCE_S
from tests.harness.workers import number_runs, scope_of
from tests.test_docs import ROOT

CASES = "import pytest\n@pytest.mark.parametrize('case', range(6))\ndef test_case(case): pass\n"


@pytest.mark.tier("full")
def test_tests_of_a_file_run_in_one_worker(tmp_path: Path) -> None:
    """The tests on GPUs run in one worker."""
    pytest.importorskip("xdist")
    files = [f"tests/{name}.py" for name in ("some/test_a", "some/test_b", "gpu/test_c", "gpu/test_d")]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(CASES)
    (tmp_path / "pytest.ini").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "-p", "tests.harness.workers", "tests"]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        command, cwd=tmp_path, env={**environment, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    workers = defaultdict(set)
    for worker, file in re.findall(r"^\[(gw\d)\].* PASSED (\S+)::", done.stdout, re.MULTILINE):
        workers[file].add(worker)
    assert sorted(workers) == sorted(files), done.stdout + done.stderr
    assert [len(found) for found in workers.values()] == [1] * 4
    assert workers["tests/gpu/test_c.py"] == workers["tests/gpu/test_d.py"]
    assert len(set.union(*workers.values())) == 2


def test_scopes() -> None:
    assert {scope_of(f"tests/some/test_a.py::test[{n}]") for n in (0, 1)} == {"tests/some/test_a.py"}
    assert len({scope_of(f"tests/test_demo.py::test[{n}]") for n in (0, 1)}) == 2
    assert {scope_of(f"tests/test_install.py::test[{n}]") for n in (0, 1)} == {"tests/test_install.py"}


def test_a_file_of_two_tiers_has_two_runs() -> None:
    order = [f"tests/some/{name}::test" for name in ("test_a.py", "test_b.py")] + ["tests/some/test_a.py::test_slow"]
    assert list(number_runs(order).values()) == ["1 tests/some/test_a.py", "2 tests/some/test_b.py", "3 tests/some/test_a.py"]
