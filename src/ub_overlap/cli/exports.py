"""What `explain` and `diff` can write beside what they print: --html, --dot, --model-explorer, --text."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ub_overlap.compiler.diff.edits import Diff


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", action="store_true", help="the graphs as a unified diff")
    parser.add_argument("--html", metavar="FILE", help="write a page that needs nothing but itself")
    parser.add_argument("--dot", metavar="FILE", help="write the edits for graphviz")
    parser.add_argument("--model-explorer", metavar="FILE", help="write both graphs for Google's model-explorer")


def write(flags: argparse.Namespace, diffs: Sequence[Diff], site: str | None = None) -> None:
    """Writes the files of `flags` but for --html, and says where they are."""
    from ub_overlap.compiler.diff.render import dot, model_explorer

    if flags.dot:
        Path(flags.dot).write_text("\n".join(dot.dot(d, site) for d in diffs) + "\n")
        told(flags.dot)
    if flags.model_explorer:
        Path(flags.model_explorer).write_text(json.dumps(model_explorer.collection(list(diffs))))
        told(flags.model_explorer)


def told(path: str | Path) -> None:
    print(f"wrote {path}", file=sys.stderr)


def unified(diffs: Sequence[Diff]) -> None:
    from ub_overlap.compiler.diff.render import text

    for d in diffs:
        print(text.unified(d, colour=text.wants_colour()))
