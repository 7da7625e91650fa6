"""`exposed`: print the exposed communication of a profiler trace."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .parsers import add_verb


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "exposed", "print the exposed communication of a torch.profiler trace", parents=[as_json],
        examples=["exposed trace.json", "exposed trace.json.gz --json"],
        exits={0: "success", 2: "bad usage, or not a trace of a device"},
        details="Communication time with no concurrent compute kernel is exposed.",
    )  # fmt: skip
    parser.add_argument("trace", metavar="TRACE.json", help="a file of export_chrome_trace (.gz too)")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Print one line per device, then its sites. OptionError if the file is not a device trace."""
    from ub_overlap.tools import exposed

    devices = exposed.read_trace(flags.trace)
    if flags.json:
        print(json.dumps([d.to_dict() for d in devices]))
        return 0
    for d in devices:
        print(d)
        for site, us in list(d.sites.items())[:40]:
            print(f"  {site:<24} {us:10.1f} us exposed")
    return 0
