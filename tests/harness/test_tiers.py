"""The rule of tiers, their order, the guard of `check`, the line about a budget, and the table of seconds."""

from __future__ import annotations

import ast
import inspect
import json
import os
from pathlib import Path

import pytest

from tests.harness import fixtures, seconds, tier_hooks, tiers

pytest_plugins = "pytester"
CONFTEST = """
import pytest
from tests.harness import tier_hooks
from tests.harness.tier_hooks import pytest_collection_modifyitems, pytest_terminal_summary, starts_no_process

def pytest_configure(config):
    tier_hooks.configure(config)
    config.addinivalue_line("markers", "gpu: on GPUs")

def pytest_addoption(parser):
    tier_hooks.add_options(parser)

@pytest.fixture
def pool2():
    return None
"""
TESTS = """
import multiprocessing, subprocess, sys
import pytest

@pytest.mark.tier("full")
def test_last(): pass
@pytest.mark.gpu
def test_gpu(): pass
def test_ranks(pool2): subprocess.run([sys.executable, "--version"])
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.tier("test"))])
def test_parameter(n): pass
@pytest.mark.tier("test")
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.tier("full"))])
def test_marked_parameter(n): pass
def test_popen(): subprocess.run([sys.executable, "--version"])
def test_fork(): multiprocessing.get_context("fork").Process(target=print).start()
"""
NAMES = {
    "check": ["test_parameter[1]", "test_popen", "test_fork"],
    "test": ["test_ranks", "test_parameter[2]", "test_marked_parameter[1]"],
    "full": ["test_last", "test_gpu", "test_marked_parameter[2]"],
}


def test_fixtures_of_ranks_are_known() -> None:
    """A fixture that makes ranks puts a test into the tier `test`; ranks that do not exist do not."""
    functions = [node for node in ast.parse(inspect.getsource(fixtures)).body if isinstance(node, ast.FunctionDef)]
    made = {function.name for function in functions if function.decorator_list}
    assert made - tiers.RANK_FIXTURES == {"fake2", "fake4"}


def test_every_test_is_in_a_tier(request: pytest.FixtureRequest) -> None:
    """A mark of no tier ends the collection. No fixture of another file makes ranks for a test of `check`."""
    items = [item for item in request.session.items if tiers.tier_of(item) == "check"]
    used = {made.func for item in items for found in item._fixtureinfo.name2fixturedefs.values() for made in found}  # type: ignore[attr-defined]
    assert items and [func.__name__ for func in used if "RankPool" in inspect.getsource(func)] == []


@pytest.mark.tier("test")  # of the tests that it runs, those of later tiers start processes
@pytest.mark.parametrize("tier", tiers.TIERS)
def test_selection_order_and_guard(tier: str, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    ran = pytester.inline_run("--tier", tier, "-p", "no:randomly")
    order = [report.nodeid.partition("::")[2] for report in ran.getreports("pytest_runtest_logreport") if report.when == "call"]
    last = tiers.TIERS.index(tier)
    assert order == [name for chosen in tiers.TIERS[: last + 1] for name in NAMES[chosen]]
    _, _, failed = ran.listoutcomes()
    assert [report.nodeid.partition("::")[2] for report in failed] == ["test_popen", "test_fork"]
    assert all('mark it with pytest.mark.tier("test")' in str(report.longrepr) for report in failed)


def test_a_mark_of_no_tier(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile('import pytest\n@pytest.mark.tier("slow")\ndef test_slow(): pass\n')
    done = pytester.runpytest_inprocess()
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*test_slow: the mark is tier(NAME), one of check, test, full; got ('slow',)"])


@pytest.mark.parametrize(("load", "budget", "said"), [(0.5, 1e-6, True), (1.5, 1e-6, False), (0.5, 600.0, False)])
def test_a_tier_over_its_budget(
    load: float, budget: float, said: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run says so in a line, and does not fail; not on a machine that was busy. `load`: for each core."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("def test_it(): pass")
    monkeypatch.setattr(os, "getloadavg", lambda: (load * tier_hooks.IDLE_LOAD, 0.0, 0.0))
    monkeypatch.setitem(tier_hooks.BUDGETS_S, "check", budget)
    done = pytester.runpytest_inprocess("--tier", "check")
    assert done.ret == 0
    assert ("over its budget" in done.stdout.str()) is said


def test_seconds_are_recorded(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run replaces what it measured and keeps the rest; files that are gone are left out."""
    pytester.makeconftest(CONFTEST)
    file = pytester.makepyfile("import time\ndef test_it(): time.sleep(0.2)\ndef test_ranks(pool2): pass\n").name
    other = pytester.makepyfile(test_other="")
    stored = pytester.path / "seconds.json"
    stored.write_text(
        json.dumps({file: {"check": [7, 9.0]}, other.name: {"full": [1, 5.0]}, "test_gone.py": {"full": [1, 1.0]}})
    )
    monkeypatch.setattr(seconds, "STORED", stored)
    pytester.runpytest_inprocess("--record", file)
    found = seconds.load()
    assert found.keys() == {file, other.name} and found[other.name] == {"full": [1, 5.0]}
    assert found[file]["check"][0] == found[file]["test"][0] == 1
    assert 0.2 <= found[file]["check"][1] < 9 and found[file]["test"][1] < 0.2


def test_the_table_of_contributing_is_current() -> None:
    """Run `python -m tests.harness.seconds` after a run with --record."""
    page = seconds.PAGE.read_text()
    assert seconds.with_table(page, seconds.load()) == page


def test_rows_of_the_table() -> None:
    stored = {
        str(Path("tests/a/test_b.py")): {"check": [2, 1.4], "test": [1, 10.0]},
        str(Path("tests/a/test_c.py")): {"full": [3, 2.0]},
        str(Path("tests/test_d.py")): {"check": [4, 0.2]},
    }
    assert seconds.table(seconds.Seconds(stored)).splitlines()[2:] == [
        "| `tests/a` | 2 | 1 | 1 | 10 | 3 | 2 |",
        "| files in `tests` | 4 | 0 | 0 | 0 | 0 | 0 |",
        "| all | 6 | 2 | 1 | 10 | 3 | 2 |",
    ]
