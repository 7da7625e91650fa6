"""Output files of `explain` and `diff`: --html, --dot, --model-explorer; and --text."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .parsers import output_file

if TYPE_CHECKING:
    from ub_overlap.compiler.diff.edits import Diff


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", action="store_true", help="print the graphs as a unified diff")
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write a self-contained HTML page")
    parser.add_argument("--dot", type=output_file, metavar="FILE", help="write the edits for graphviz")
    parser.add_argument(
        "--model-explorer", type=output_file, metavar="FILE", help="write both graphs for Google's model-explorer"
    )


def write(flags: argparse.Namespace, diffs: Sequence[Diff], site: str | None = None) -> None:
    """Write the files that `flags` name, except --html, and print their paths."""
    from ub_overlap.compiler.diff.render import dot, model_explorer

    if flags.dot:
        flags.dot.write_text("\n".join(dot.dot(d, site) for d in diffs) + "\n", encoding="utf-8")
        report_written(flags.dot)
    if flags.model_explorer:
        flags.model_explorer.write_text(json.dumps(model_explorer.collection(list(diffs))))
        report_written(flags.model_explorer)


def report_written(path: str | Path) -> None:
    print(f"wrote {path}", file=sys.stderr)


def unified(diffs: Sequence[Diff]) -> None:
    from ub_overlap.compiler.diff.render import text
    from ub_overlap.compiler.text.terminal import wants_color

    for d in diffs:
        print(text.unified(d, color=wants_color()))
