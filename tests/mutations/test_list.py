"""The list of mutations fits the sources and the tests. No mutation runs here."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.mutations.catalogue import AREAS, SURVIVORS
from tests.mutations.mutation import ROOT, Mutation

ALL = {m.name: m for m in (*(m for mutations in AREAS.values() for m in mutations), *SURVIVORS)}


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of the test functions in a file of tests."""
    tree = ast.parse((ROOT / file).read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


@pytest.mark.parametrize("name", ALL)
def test_it_fits_the_sources(name: str) -> None:
    """The old text occurs once, and the file is as valid with the new text. Its tests exist."""
    mutation = ALL[name]
    changed = mutation.apply((ROOT / mutation.file).read_text())
    if mutation.file.endswith(".py"):
        ast.parse(changed)
    for test in mutation.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), file
        assert not function or function in functions_of(file), test


def test_names() -> None:
    counts = Counter(m.name for m in (*(m for mutations in AREAS.values() for m in mutations), *SURVIVORS))
    assert [name for name, count in counts.items() if count > 1] == []
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in counts)


def test_enough_of_all_areas() -> None:
    known = [m for mutations in AREAS.values() for m in mutations]
    assert len(known) >= 70
    assert len({m.file for m in known}) >= 40
    assert all(len(mutations) >= 8 for mutations in AREAS.values())


def test_survivors_say_why() -> None:
    assert all(m.note for m in SURVIVORS)
    assert not any(m.note for mutations in AREAS.values() for m in mutations)


def test_a_text_that_is_not_there_is_refused() -> None:
    wrong = Mutation(name="x", file="compiler/passes.py", old="no such text", new="", fault="", tests=())
    with pytest.raises(ValueError, match="occurs 0 times"):
        wrong.apply(Path(ROOT, wrong.file).read_text())
