"""Sphinx configuration of the site: `make docs` builds it in build/docs.

The pages are plain Markdown and read well as files. What is added here: the tree of contents, which is the order of links in
index.md; the README as page overview.md; the public API by autodoc (reference/autodoc.rst, written for each build); and links
that leave docs/, which point to the repository. Pages of docs/lab stay out of contents and search: they are notes on what was
tried, and name everything.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import ub_overlap

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
METADATA, REPOSITORY = PYPROJECT["project"], PYPROJECT["tool"]["ub_overlap"]["repository"].rstrip("/")

project = METADATA["name"]
author = "the ub_overlap authors"
release = version = ub_overlap.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["data"]
nitpicky = False  # signatures name types of torch, whose inventory would need a network

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False

myst_heading_anchors = 4  # the anchors of GitHub
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"

PAGE_LINK = re.compile(r"\]\(([\w/]+)\.md\)")
PYTHON_PAGE = ROOT / "docs" / "reference" / "autodoc.rst"


def write_api_page(*_: Any) -> None:
    """Write the page of the public names, one autodoc directive for each."""
    lines = ["Python API", "==========", "", "From the docstrings. :doc:`api` has the same names as text.", ""]
    for name in sorted(ub_overlap.__all__):
        value = getattr(ub_overlap, name)
        module = getattr(value, "__module__", "")
        if module == ub_overlap.errors.__name__:
            continue  # with the module of all errors
        if isinstance(value, type):
            lines += [f".. autoclass:: {module}.{value.__qualname__}", "   :members:", ""]
        elif callable(value) and hasattr(value, "__qualname__"):
            lines += [f".. autofunction:: {module}.{value.__qualname__}", ""]
        elif hasattr(value, "__file__"):
            lines += [f".. automodule:: {value.__name__}", "   :members:", ""]
    text = "\n".join(lines)
    if not PYTHON_PAGE.exists() or PYTHON_PAGE.read_text() != text:
        PYTHON_PAGE.write_text(text)


def add_contents(_: Any, docname: str, source: list[str]) -> None:
    """Append a tree of contents to the first page: for each section the pages that it links to."""
    if docname != root_doc:
        return
    trees = []
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        caption = section.partition("\n")[0]
        pages = [page for page in dict.fromkeys(PAGE_LINK.findall(section)) if not page.startswith("lab/")]
        pages += [PYTHON_PAGE.relative_to(ROOT / "docs").with_suffix("").as_posix()] if caption == "Reference" else []
        if pages:
            trees.append("\n".join(["```{toctree}", ":hidden:", ":maxdepth: 1", f":caption: {caption}", "", *pages, "```"]))
    source[0] = "\n\n".join([source[0], *trees])


def show_readme(_: Any, docname: str, source: list[str]) -> None:
    """Replace the page `overview` by the README, with links that start in docs/."""
    if docname == "overview":
        text = re.sub(r"\]\((?!docs/|[a-z]+:|#)", "](../", (ROOT / "README.md").read_text())
        source[0] = text.replace("](docs/", "](")


def hide_lab(_: Any, docname: str, source: list[str]) -> None:
    """Keep a page of docs/lab out of the search index. It is in no tree of contents."""
    if docname.startswith("lab/"):
        source[0] = f"---\norphan: true\nnosearch: true\n---\n\n{source[0]}"


def link_to_repository(app: Any, docname: str, source: list[str]) -> None:
    """Replace links to files outside of docs/, and to folders, by links to the repository; without one, by their text."""
    folder = (ROOT / "docs" / docname).parent

    def replaced(match: re.Match[str]) -> str:
        text, link = match.groups()
        file, hash_sign, anchor = link.partition("#")
        target = (folder / file).resolve()
        is_page = target.is_relative_to(ROOT / "docs") and target.is_file()
        if not file or re.match(r"[a-z]+:", link) or is_page or not target.is_relative_to(ROOT):
            return match[0]
        if not REPOSITORY:
            return text
        return f"[{text}]({REPOSITORY}/blob/main/{target.relative_to(ROOT)}{hash_sign}{anchor})"

    source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", replaced, source[0])


def setup(app: Any) -> None:
    app.connect("builder-inited", write_api_page)
    for handler in (show_readme, link_to_repository, hide_lab, add_contents):
        app.connect("source-read", handler)
