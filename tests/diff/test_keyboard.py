"""Tests of the HTML page by keyboard, with real key presses in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.diff.devtools import BROWSER, Page
from tests.diff.samples import report
from ub_overlap.compiler.diff.render import html

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")

FOCUSED = "document.activeElement.dataset.site || document.activeElement.dataset.filter || document.activeElement.id"
OUTLINE = "getComputedStyle(document.activeElement).outlineStyle"
CURRENT = "[...document.querySelectorAll('#sites [aria-current=true]')].map((e) => e.dataset.site).join()"
SHOWN = "document.getElementById('detail').hidden ? '' : document.getElementById('detail').getAttribute('aria-label')"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with Page(html.write(tmp_path / "page.html", report()), tmp_path / "profile") as page:
        yield page


def tab_to(page: Page, name: str) -> None:
    for _ in range(30):
        page.press("Tab")
        if page.evaluate(FOCUSED) == name:
            return
    raise AssertionError(f"{name} cannot be reached by Tab")


def test_sites_by_keyboard(page: Page) -> None:
    """Tab reaches every site with a visible focus, Enter and Space open it, Escape closes it; the focus stays in the list."""
    tab_to(page, "forward.0")
    assert page.evaluate(OUTLINE) == "solid" and page.evaluate(SHOWN) == ""
    page.press("Tab")
    assert page.evaluate(FOCUSED) == "forward.1" and page.evaluate(OUTLINE) == "solid"
    page.press("Enter")
    assert page.evaluate(SHOWN) == "Site forward.1"
    assert page.evaluate(CURRENT) == page.evaluate(FOCUSED) == "forward.1"
    page.press("Tab", " ")
    assert (page.evaluate(SHOWN), page.evaluate(CURRENT)) == ("Site forward.2", "forward.2")
    page.press("ArrowUp")
    assert page.evaluate(FOCUSED) == "forward.1" and page.evaluate(CURRENT) == "forward.2", "moving does not open"
    page.press("Home")
    assert page.evaluate(FOCUSED) == "forward.0"
    page.press("End", "ArrowDown", "Escape")
    assert (page.evaluate(SHOWN), page.evaluate(CURRENT), page.evaluate(FOCUSED)) == ("", "", "forward.2")
    page.press("k")
    assert (page.evaluate(CURRENT), page.evaluate(FOCUSED)) == ("forward.2", "forward.2")
    page.press("k")
    assert (page.evaluate(CURRENT), page.evaluate(FOCUSED)) == ("forward.1", "forward.1"), "the focus follows j and k"


def test_filters_keep_the_focus(page: Page) -> None:
    tab_to(page, "missed")
    page.press("Enter")
    assert page.evaluate(FOCUSED) == "missed"
    page.press("Tab")
    assert page.evaluate(FOCUSED) == "forward.2", "the only missed site"


def test_the_panel_returns_the_focus(page: Page) -> None:
    """Nodes of a site and the close button are reached by Tab; closing returns to the site."""
    tab_to(page, "forward.0")
    page.press("Enter")
    page.evaluate("document.querySelector('#detail .close').focus()")
    page.press("Tab")
    assert page.evaluate("document.activeElement.className") == "gone" and page.evaluate(OUTLINE) == "solid"
    page.press("Enter")
    assert page.evaluate("document.querySelectorAll('.row.here').length") == 1
    page.press("Escape")
    assert (page.evaluate(SHOWN), page.evaluate(FOCUSED)) == ("", "forward.0")


def test_the_graphs_are_one_key_away(page: Page) -> None:
    page.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the graphs"
    page.press("Enter")
    assert page.evaluate("document.activeElement.id") in ("list", "") and page.evaluate("location.hash") == "#list"


def test_names_for_screen_readers(page: Page) -> None:
    """Every element that takes the focus has a name."""
    nameless = """[...document.querySelectorAll('button, input, a, [tabindex="0"]')].filter((e) =>
        !(e.textContent.trim() || e.getAttribute('aria-label') || e.closest('label'))).map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(nameless) == []
    assert page.evaluate("document.querySelectorAll('#sites > li > button').length") == 3
