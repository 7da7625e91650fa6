"""`diff`: compare the stored reports of two runs, ranks or versions."""

from __future__ import annotations

import argparse
import json
from typing import Any

from . import exports
from .parsers import add_verb
from .report_path import HELP, report_path


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "diff", "compare two reports: graphs and decisions that differ", parents=[as_json],
        examples=["diff before.json after.json", "diff rank0.json rank1.json --html page.html", "diff 9f2c0a1b 5d7e"],
        exits={0: "the reports are the same", 1: "they differ", 2: "bad usage, or not a report"},
    )  # fmt: skip
    parser.add_argument("a", metavar="A", help=HELP)
    parser.add_argument("b", metavar="B", help="the report that it is compared with")
    exports.add(parser)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Return 0 if both are the same, 1 if they differ. OptionError for a file that is not a report."""
    from ub_overlap.compiler.diff import stored_report
    from ub_overlap.compiler.diff.render import site_section
    from ub_overlap.compiler.text.terminal import output_width

    a, b = (stored_report.read_report(report_path(text)) for text in (flags.a, flags.b))
    comparison = stored_report.compare_reports(a, b, (flags.a, flags.b))
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
        print(site_section.render_comparison(comparison, output_width()))
    return 0 if comparison.same else 1
