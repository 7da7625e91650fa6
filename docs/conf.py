"""Sphinx configuration of the site: `make docs` builds it in build/docs.

The pages are plain Markdown and read well as files. Three things are added here: the tree of contents (contents.rst), the
public API by autodoc (reference/autodoc.rst, written for each build), and links that leave docs/, which point to the
repository.
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
root_doc = "contents"
exclude_patterns = ["data"]
nitpicky = False  # signatures name types of torch, whose inventory would need a network

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False

myst_heading_anchors = 4  # the anchors of GitHub
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"

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
    app.connect("source-read", link_to_repository)
