"""`python -m ub_overlap`: what is installed here, the stored reports, and the measuring of this machine.

    python -m ub_overlap --version
    python -m ub_overlap info [--json]                  versions, the extension, CUDA
    python -m ub_overlap report list [--json]           stored reports, newest first
    python -m ub_overlap report show DIGEST [--json]    one of them; the first digits of the digest suffice
    torchrun --nproc-per-node N -m ub_overlap calibrate [--quick] [--out FILE]
                                                        measure this machine for the cost model

Exit codes: 0 it worked; 1 it did not (`info`: the package cannot run here; `report`: no such report); 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from tabulate import tabulate

from ub_overlap import __version__
from ub_overlap.runtime import plan_store


def info() -> dict[str, Any]:
    """What is installed. `problem` is None, or why the package cannot run here. Imports torch and the extension."""
    facts: dict[str, Any] = {
        "ub_overlap": __version__,
        "python": platform.python_version(),
        "torch": None,
        "extension": None,
        "cuda_devices": 0,
        "reports": str(plan_store.directory()),
        "problem": None,
    }
    try:
        import torch

        facts["torch"] = str(torch.__version__)
        facts["cuda_devices"] = torch.cuda.device_count()
        from ub_overlap.runtime import ops

        facts["extension"] = ops.load().build_info()
    except Exception as error:  # noqa: BLE001  (whatever keeps the package from running is what this command is for)
        facts["problem"] = f"{type(error).__name__}: {error}"
    return facts


def show_info(*, as_json: bool) -> int:
    facts = info()
    if as_json:
        print(json.dumps(facts))
    else:
        width = max(map(len, facts))
        for key, value in facts.items():
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            print(f"{key:<{width}}  {'none' if value is None else value}")
    return 1 if facts["problem"] else 0


def stored() -> list[dict[str, Any]]:
    """The stored plans, newest first: digest, phase, sites, overlapped, written (local time)."""
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
                "overlapped": sum(strategy.startswith(("pipelined", "bulk")) for strategy in strategies),
                "written": datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds"),
            }
        )
    return rows


def list_reports(*, as_json: bool) -> int:
    rows = stored()
    if as_json:
        print(json.dumps(rows))
    elif rows:
        print(table(rows))
    else:
        print(f"no reports in {plan_store.directory()}; compiling a model with backend='ub_overlap' stores one a graph")
    return 0


def show_report(digest: str, *, as_json: bool) -> int:
    """Print the report whose digest begins with `digest`; 1 if there is none, or more than one."""
    found = [row["digest"] for row in stored() if row["digest"].startswith(digest)]
    text = plan_store.load(found[0]) if len(found) == 1 else None
    if text is None:
        problem = f"{len(found)} reports begin with it: {', '.join(found)}" if found else "no such report"
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


def measure_machine(out: str | None, device: str | None, *, quick: bool) -> int:
    """Calibrate; 1 with a message where that cannot be done."""
    # NVLink multicast is never used: said before torch is imported.
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")):
        os.environ[name] = value
    from ub_overlap.compiler.cost.calibration import calibrate
    from ub_overlap.runtime.errors import UbOverlapError

    try:
        calibrate(out, device, quick=quick)
    except UbOverlapError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of the same keys under a header; values as they are (a digest of digits is not a number)."""
    return tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code. SystemExit(2) with a message for bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m ub_overlap", description="Hides tensor-parallel communication behind matmuls."
    )
    parser.add_argument("--version", action="version", version=f"ub_overlap {__version__}")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{info,report,calibrate}")
    verbs.add_parser("info", parents=[as_json], help="versions, the extension, CUDA")
    report = verbs.add_parser("report", help="stored reports").add_subparsers(dest="what", required=True, metavar="{list,show}")
    report.add_parser("list", parents=[as_json], help="stored reports, newest first")
    show = report.add_parser("show", parents=[as_json], help="one stored report")
    show.add_argument("digest", help="the report's digest, or its first digits")
    calibrate = verbs.add_parser("calibrate", help="measure this machine for the cost model (under torchrun)")
    calibrate.add_argument("--out", help="write the profile there, and not to the user's cache")
    calibrate.add_argument("--quick", action="store_true", help="a quarter of the points")
    calibrate.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    flags = parser.parse_args(argv)
    if flags.verb == "calibrate":
        return measure_machine(flags.out, flags.device, quick=flags.quick)
    if flags.verb == "info":
        return show_info(as_json=flags.json)
    if flags.what == "list":
        return list_reports(as_json=flags.json)
    return show_report(flags.digest, as_json=flags.json)


if __name__ == "__main__":
    sys.exit(main())
