"""`report list`, `report show`: stored reports."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from typing import Any

from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import OptionError, StoredFileError

from .parsers import add_verb


def stored_plans() -> list[dict[str, Any]]:
    """Return the stored plans, newest first: digest, phase, sites, overlapped, written (local time)."""
    from ub_overlap.compiler.plan import plan_files

    rows = []
    for _, changed, plan in plan_files.stored_plans(report_skipped):
        strategies = [site["strategy"] for site in plan["sites"]]
        rows.append(
            {
                "digest": plan["digest"],
                "phase": plan["phase"],
                "sites": len(strategies),
                "overlapped": sum(strategy not in ("none", "merged") for strategy in strategies),
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
    """Print the report whose digest begins with `digest`. OptionError if there is none, or more than one, or it is damaged."""
    from ub_overlap.compiler.plan import plan_files

    named = sorted(plan_store.directory().glob("*.json")) if plan_store.is_digest(digest.ljust(8, "0")) else []
    paths = [path for path in named if path.stem.startswith(digest) and path.is_file()]
    digests = [path.stem for path in paths]
    if len(paths) != 1:
        problem = f"{len(digests)} reports begin with it: {', '.join(digests)}" if digests else "no such report"
        raise OptionError(
            problem, where=str(plan_store.directory()), got=repr(digest), fix="python -m ub_overlap report list shows all"
        )
    plan = plan_files.read_plan(paths[0])
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
    show.add_argument("digest", metavar="DIGEST", help="the report's digest, or its first digits")
    show.set_defaults(run=lambda flags: show_report(flags.digest, as_json=flags.json))
