"""The three tiers of tests.

    check   pure tests: no process, no ranks, no whole compilation        make check
    test    what every change runs, with check                            make test, CI
    full    everything: also fuzz, families, soak, installs, examples     make full

The rule: the closest mark `tier` (of the parameter, the function, the class, or the module's `pytestmark`) is a test's tier.
Without a mark, a test on GPUs is in `full`, one that takes ranks in `test`, and any other in `check`. A test of `check` that
starts a process fails (tier_hooks.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

TIERS = ("check", "test", "full")
BUDGETS_S = {"check": 100, "test": 720, "full": 3600}
"""Seconds of each tier on two idle cores, set-up and lint not counted."""
RANK_FIXTURES = frozenset({"pool2", "pool3", "pool4", "hf2", "hf4", "lockstep"})


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test. UsageError for a mark that names no tier."""
    if marked := [_named(item, mark) for mark in _marks(item)]:
        return max(marked, key=TIERS.index)  # several parameters may have marks
    if item.get_closest_marker("gpu") is not None:
        return "full"
    return "test" if RANK_FIXTURES & set(getattr(item, "fixturenames", ())) else "check"


def _marks(item: pytest.Item) -> list[pytest.Mark]:
    """Return the marks `tier` of the parameters; where they have none, the closest other one."""
    callspec = getattr(item, "callspec", None)
    of_parameters = [mark for mark in (callspec.marks if callspec else ()) if mark.name == "tier"]
    closest = item.get_closest_marker("tier")  # for pytest, the function is closer than its parameters
    return of_parameters or ([closest] if closest else [])


def _named(item: pytest.Item, mark: pytest.Mark) -> str:
    if mark.args[:1] not in {(tier,) for tier in TIERS} or mark.kwargs:
        raise pytest.UsageError(f"{item.nodeid}: the mark is tier(NAME), one of {', '.join(TIERS)}; got {mark.args}")
    return str(mark.args[0])


def full_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return parameters of which those not in `kept` are in the tier `full`: they repeat what `kept` shows.

    A tuple has the values of several arguments, as in pytest.mark.parametrize.
    """
    chosen, values = list(kept), list(values)
    if unknown := [value for value in chosen if value not in values]:
        raise ValueError(f"kept, but not among the values: {unknown}")
    return [value if value in chosen else in_full(value) for value in values]


def in_full(value: Any) -> Any:
    """Return a parameter in the tier `full`."""
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.tier("full"))


INNER = full_but(["aot_eager"], ["aot_eager", "inductor"])
"""What compiles a rewritten graph. Inductor, the slower one, is in `full` where another test shows it with the same ops."""
