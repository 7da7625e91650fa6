"""`report list`, `report show`: stored reports."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from typing import Any

from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import StoredFileError

from .parsers import add_verb
from .report_path import report_path


def stored_plans() -> list[dict[str, Any]]:
    """Return the stored plans, newest first: digest, phase, sites, overlapped, written (local time)."""
    from ub_overlap.compiler.plan import plan_files
    from ub_overlap.compiler.plan.outcome import outcome_of

    rows = []
    for _, changed, plan in plan_files.stored_plans(report_skipped):
        rows.append(
            {
                "digest": plan["digest"],
                "phase": plan["phase"],
                "sites": len(plan["sites"]),
                "overlapped": sum(outcome_of(site["strategy"], site["reason"]).is_overlapped for site in plan["sites"]),
                "written": datetime.fromtimestamp(changed).isoformat(" ", "seconds"),
            }
        )
    return rows


def report_skipped(error: StoredFileError) -> None:
    """Print the line of a damaged file of the store; the command goes on without it."""
    print(f"skipped {error.line}", file=sys.stderr)


def list_reports(*, as_json: bool) -> int:
    """Print the stored reports. A user without a home folder has none."""
    none = "no reports"
    rows: list[dict[str, Any]] = []
    try:
        none += f" in {plan_store.directory()}; compiling a model with backend='ub_overlap' stores one per graph"
        rows = stored_plans()
    except FileNotFoundError as error:
        none += f": {error.strerror}"
    if as_json:
        print(json.dumps(rows))
    elif rows:
        print(table(rows))
    else:
        print(none)
    return 0


def show_report(digest: str, *, as_json: bool) -> int:
    """Print the report of a digest, its first digits or a file. OptionError if there is not exactly one, or it is damaged."""
    from ub_overlap.compiler.plan import plan_files

    plan = plan_files.read_plan(report_path(digest))
    if as_json:
        print(json.dumps(plan))
        return 0
    print(f"{plan['digest']}  {plan['phase']}  {len(plan['sites'])} sites")
    rows = []
    for site in plan["sites"]:
        decision = site["strategy"] if site["reason"] is None else f"{site['strategy']}: {site['reason']}"
        shapes = " ".join(f"{what} {shape}" for what, shape in site["shapes"].items())
        rows.append(
            {"site": site["id"], "kind": site["kind"], "decision": decision, "shapes": shapes, "module": site["module"]}
        )
    print(table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of the same keys as a table that fits the terminal."""
    from ub_overlap.compiler.text.table import render_table
    from ub_overlap.compiler.text.terminal import output_width

    return render_table(rows, width=output_width(), optional=("shapes", "written", "module"))


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    report = add_verb(
        verbs, "report", "list and show stored reports", examples=["report list", "report show 9f2c0a1b"],
        details="Every compilation stores one report per graph, under the digest of its plan.",
    )  # fmt: skip
    whats = report.add_subparsers(dest="what", required=True, metavar="{list,show}")
    listing = add_verb(
        whats, "list", "list stored reports, newest first", parents=[as_json], examples=["report list", "report list --json"]
    )
    listing.set_defaults(run=lambda flags: list_reports(as_json=flags.json))
    show = add_verb(
        whats, "show", "show one stored report", parents=[as_json], examples=["report show 9f2c0a1b"],
        exits={0: "success", 2: "bad usage, or not exactly one report has that digest"},
    )  # fmt: skip
    show.add_argument("digest", metavar="DIGEST", help="the digest of a stored report, its first digits, or its file")
    show.set_defaults(run=lambda flags: show_report(flags.digest, as_json=flags.json))
