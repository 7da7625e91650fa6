"""`report list`, `report show`: stored reports."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import OptionError

from .parsers import add_verb


def stored_plans() -> list[dict[str, Any]]:
    """Return the stored plans, newest first: digest, phase, sites, overlapped, written (local time)."""
    rows = []
    folder = plan_store.directory()
    paths = sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True) if folder.is_dir() else []
    for path in paths:
        plan = json.loads(path.read_text())
        strategies = [site["strategy"] for site in plan["sites"]]
        rows.append(
            {
                "digest": plan["digest"],
                "phase": plan["phase"],
                "sites": len(strategies),
                "overlapped": sum(strategy not in ("none", "merged") for strategy in strategies),
                "written": datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds"),
            }
        )
    return rows


def list_reports(*, as_json: bool) -> int:
    rows = stored_plans()
    if as_json:
        print(json.dumps(rows))
    elif rows:
        print(table(rows))
    else:
        print(f"no reports in {plan_store.directory()}; compiling a model with backend='ub_overlap' stores one per graph")
    return 0


def show_report(digest: str, *, as_json: bool) -> int:
    """Print the report whose digest begins with `digest`. OptionError if there is none, or more than one."""
    digests = [row["digest"] for row in stored_plans() if row["digest"].startswith(digest)]
    text = plan_store.load(digests[0]) if len(digests) == 1 else None
    if text is None:
        problem = f"{len(digests)} reports begin with it: {', '.join(digests)}" if digests else "no such report"
        raise OptionError(
            problem, where=str(plan_store.directory()), got=repr(digest), fix="python -m ub_overlap report list shows all"
        )
    if as_json:
        print(text)
        return 0
    plan = json.loads(text)
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
        verbs, "report", "list and show stored reports", examples=["report list", "report show 61010f66"],
        details="Every compilation stores one report per graph, under the digest of its plan.",
    )  # fmt: skip
    whats = report.add_subparsers(dest="what", required=True, metavar="{list,show}")
    listing = add_verb(
        whats, "list", "list stored reports, newest first", parents=[as_json], examples=["report list", "report list --json"]
    )
    listing.set_defaults(run=lambda flags: list_reports(as_json=flags.json))
    show = add_verb(
        whats, "show", "show one stored report", parents=[as_json], examples=["report show 61010f66"],
        exits={0: "success", 2: "bad usage, or not exactly one report has that digest"},
    )  # fmt: skip
    show.add_argument("digest", help="the report's digest, or its first digits")
    show.set_defaults(run=lambda flags: show_report(flags.digest, as_json=flags.json))
