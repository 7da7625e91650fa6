"""`report list`, `report show`: stored reports."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from typing import Any

from ub_overlap.runtime import plan_store


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
    """Print the report whose digest begins with `digest`. Return 1 if there is none, or more than one."""
    digests = [row["digest"] for row in stored_plans() if row["digest"].startswith(digest)]
    text = plan_store.load(digests[0]) if len(digests) == 1 else None
    if text is None:
        problem = f"{len(digests)} reports begin with it: {', '.join(digests)}" if digests else "no such report"
        print(
            f"report {digest!r}: {problem} in {plan_store.directory()}; see: python -m ub_overlap report list", file=sys.stderr
        )
        return 1
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
    """Return rows of the same keys as a table. Values are not converted: a digest of digits is not a number."""
    from tabulate import tabulate

    return tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True)


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    whats = verbs.add_parser("report", help="stored reports").add_subparsers(dest="what", required=True, metavar="{list,show}")
    listing = whats.add_parser("list", parents=[as_json], help="list stored reports, newest first")
    listing.set_defaults(run=lambda flags: list_reports(as_json=flags.json))
    show = whats.add_parser("show", parents=[as_json], help="show one stored report")
    show.add_argument("digest", help="the report's digest, or its first digits")
    show.set_defaults(run=lambda flags: show_report(flags.digest, as_json=flags.json))
