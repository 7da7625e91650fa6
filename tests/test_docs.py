"""The documentation: generated pages are current, links and paths exist, lines wrap, stored measurements are readable."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ub_overlap.tools.docs.generate import generate_pages

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WIDTH = 120
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_reference_pages_are_current() -> None:
    """Run `python -m ub_overlap.tools.docs` after a change of options, ops, reasons, errors, settings or public names."""
    committed = {path.name: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    generated = generate_pages()
    assert sorted(committed) == sorted(generated)
    assert [name for name, text in generated.items() if committed[name] != text] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_exist(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page that are neither code nor table nor image."""
    in_code = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith(("|", "![", "[![")) and not line.startswith("    "):
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_wrap(page: Path) -> None:
    assert [number for number, line in prose_lines(page.read_text()) if len(line) > WIDTH] == []


def test_pages_that_sources_name_exist() -> None:
    folders = ("src", "compiler", "runtime", "tools", "csrc", "examples", "benchmarks", "tests")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cpp", ".cu")]
    named = {(name_of(path), page) for path in sources for page in re.findall(r"\bdocs/[\w/]+\.md", path.read_text())}
    assert sorted((source, page) for source, page in named if not (ROOT / page).is_file()) == []


def test_folders_that_pages_name_exist() -> None:
    """Paths of sources in prose and tables, e.g. `compiler/select/` or `runtime/schedule/steps.py`."""
    path = re.compile(r"`((?:compiler|runtime|tools|csrc|examples|benchmarks|tests|src)/[\w/.]+)`")
    missing = [(name_of(page), name) for page in PAGES for name in path.findall(page.read_text()) if not (ROOT / name).exists()]
    assert not missing


def test_every_page_is_reachable_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    assert [name_of(page) for page in (ROOT / "docs").rglob("*.md") if page != index and page not in linked] == []


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "data").glob("*.json")), ids=lambda path: path.name)
def test_stored_measurements_are_json(file: Path) -> None:
    assert json.loads(file.read_text())
