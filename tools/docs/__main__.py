"""Write the reference pages: python -m ub_overlap.tools.docs [--check] [FOLDER]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .generate import generate_pages


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them with --check. Return 1 if a page differs."""
    parser = argparse.ArgumentParser(prog="python -m ub_overlap.tools.docs", description=__doc__)
    parser.add_argument("folder", nargs="?", default="docs/reference", help="default: docs/reference of the current folder")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    flags = parser.parse_args(argv)
    folder = Path(flags.folder)
    changed = []
    for name, text in generate_pages().items():
        path = folder / name
        if path.is_file() and path.read_text() == text:
            continue
        changed.append(name)
        if not flags.check:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    print(f"{len(changed)} pages {'differ' if flags.check else 'written'} in {folder}: {', '.join(changed) or 'none'}")
    return 1 if flags.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
