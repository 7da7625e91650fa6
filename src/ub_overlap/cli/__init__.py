"""The command line: one file per verb. Each file defines `add(verbs, as_json)`, which adds its parser and function.

    parsers.py     parsers: usage errors in one line, examples, types of file arguments
    failures.py    an error -> one line, an exit code, JSON

Verbs import their dependencies when they run. `--version`, `--help`, `report`, `explain` and `diff` load no torch. `doctor`
also works if torch or another third-party package is missing or broken.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from ub_overlap import __version__

from . import bisect, cache, calibrate, cfg, completion, diff, doctor, explain, exposed, info, plan, stored
from .failures import guarded, make_output_safe
from .parsers import PROG, Parser

VERBS = (info, doctor, stored, explain, diff, bisect, exposed, calibrate, plan, cfg, cache, completion)


def build_parser() -> Parser:
    """Return the parser of the command line. `parsers.all_parsers` returns it and those of its verbs."""
    parser = Parser(
        prog=PROG,
        description="Hides the communication of parallel models behind their compute. The verbs diagnose a machine, show and "
        "compare reports, and plan without a GPU.",
        examples=["doctor", "report list", "plan --model llama-70b", "VERB --help"],
        exits={
            0: "success",
            1: "the verb found a problem, e.g. reports that differ, or the disk is full",
            2: "bad usage, or a file that cannot be read",
            3: "an error inside this package",
            130: "interrupted",
            141: "the reader of its output ended, e.g. head",
        },
    )
    parser.add_argument("--version", action="version", version=f"ub_overlap {__version__}", help="print the version")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error, as UB_OVERLAP_DEBUG=1 does")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON, also for an error")
    verbs: Any = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add(verbs, as_json)
    parser.set_defaults(parser=parser)  # `completion` prints it
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. SystemExit(2) for bad usage."""
    make_output_safe()
    words = list(sys.argv[1:] if argv is None else argv)
    own = words[: words.index("--")] if "--" in words else words  # the rest is a command, with flags of its own
    parser = build_parser()
    verb = next((word for word in own if not word.startswith("-")), "")
    debug = "--traceback" in own or os.environ.get("UB_OVERLAP_DEBUG", "0") not in ("", "0")

    def body() -> int:
        flags = parser.parse_args(words)
        return int(flags.run(flags))

    return guarded(body, f"{PROG} {verb}".rstrip(), as_json="--json" in own, show_traceback=debug)
