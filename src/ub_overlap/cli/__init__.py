"""The command line: one file per verb. Each file defines `add(verbs, as_json)`, which adds its parser and function.

Verbs import their dependencies when they run. `--version`, `report`, `explain` and `diff` load no torch. `doctor` also works
if torch or another third-party package is missing or broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ub_overlap import __version__
from ub_overlap.runtime.errors import UbOverlapError

from . import bisect, calibrate, cfg, diff, doctor, explain, exposed, info, plan, stored


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. SystemExit(2) with a message for bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m ub_overlap", description="Hides tensor-parallel communication behind matmuls."
    )
    parser.add_argument("--version", action="version", version=f"ub_overlap {__version__}")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (info, doctor, stored, explain, diff, bisect, exposed, calibrate, plan, cfg):
        verb.add(verbs, as_json)
    flags = parser.parse_args(argv)
    try:
        return flags.run(flags)
    except (UbOverlapError, OSError) as error:  # OSError: a file that cannot be written
        print(error, file=sys.stderr)
        return 1
