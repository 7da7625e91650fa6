"""`explain`: show a stored report as text, HTML page or graph."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ub_overlap.runtime.errors import OptionError

from . import exports
from .parsers import add_verb, output_file
from .report_path import HELP, report_path


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "explain", "show a report: decisions, reasons, edits", parents=[as_json],
        examples=["explain report.json", "explain report.json --site forward.0", "explain 9f2c0a1b --html page.html"],
        exits={0: "success", 2: "bad usage, not a report, or no such site"},
    )  # fmt: skip
    parser.add_argument("report", metavar="REPORT", help=HELP)
    parser.add_argument("--site", metavar="ID", help='show one site, e.g. "forward.0"')
    parser.add_argument(
        "--perfetto",
        type=output_file,
        metavar="FILE",
        help="write the steps of the sites for ui.perfetto.dev, predicted and measured",
    )
    exports.add(parser)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Print the report. OptionError for an unknown site, or a file that is not a report."""
    from ub_overlap.compiler.diff import stored_report
    from ub_overlap.compiler.diff.graph_store import PlanGraphs
    from ub_overlap.compiler.diff.render import site_section
    from ub_overlap.compiler.text.terminal import output_width

    report = stored_report.read_report(report_path(flags.report))
    known = [site["id"] for site in report["sites"]]
    if flags.site and flags.site not in known:
        raise OptionError(f"no site {flags.site!r}", where=flags.report, expected=f"one of {', '.join(known) or 'none'}")
    diffs = [d for g in map(PlanGraphs.from_dict, report["graphs"]) for d in (g.joint_diff(), g.diff()) if d is not None]
    if flags.html:
        from ub_overlap.compiler.diff.render import html

        exports.report_written(html.write(flags.html, report, flags.report))
    if flags.perfetto:
        from ub_overlap.compiler.reports import timeline

        lanes = timeline.stored_lanes(report.get("lanes") or {}, flags.site)
        exports.report_written(timeline.write_timeline(flags.perfetto, lanes))
    exports.write(flags, diffs, flags.site)
    if flags.json:
        rows = [site for site in report["sites"] if flags.site in (None, site["id"])]
        edits = [{**d.to_dict(), "edits": [e for e in d.to_dict()["edits"] if flags.site in (None, e["site"])]} for d in diffs]
        print(json.dumps({"plans": report["plans"], "sites": rows, "diff": edits}))
    elif flags.text:
        exports.unified(diffs)
    elif flags.site:
        print(site_section.render_site(report, diffs, flags.site))
    else:
        print(site_section.render_overview(report, diffs, output_width()))
    return 0
