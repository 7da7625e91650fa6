"""`diff`: compare the stored reports of two runs, ranks or versions."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ub_overlap.runtime.errors import OptionError

from . import exports


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser("diff", parents=[as_json], help="compare two stored reports: graphs and decisions that differ")
    parser.add_argument("a", metavar="A.json", help="a file of Report.to_json(), or a stored plan")
    parser.add_argument("b", metavar="B.json")
    exports.add(parser)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Return 0 if both are the same, 1 if they differ, 2 if a file cannot be read."""
    from ub_overlap.compiler.diff import stored_report
    from ub_overlap.compiler.diff.render import site_section

    try:
        comparison = stored_report.compare_reports(
            stored_report.read_report(flags.a), stored_report.read_report(flags.b), (flags.a, flags.b)
        )
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    if flags.html:
        from ub_overlap.compiler.diff.render import html

        diffs = comparison.shown or [*comparison.before, *comparison.after]
        exports.report_written(html.write_diffs(flags.html, diffs, f"{flags.a} against {flags.b}"))
    exports.write(flags, comparison.shown)
    if flags.json:
        print(json.dumps(comparison.to_dict()))
    elif flags.text:
        exports.unified(comparison.shown)
    else:
        print(site_section.render_comparison(comparison))
    return 0 if comparison.same else 1
