"""`import-cfg`: print a tp_comm_overlap_cfg as rules."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser(
        "import-cfg", parents=[as_json], help="print a tp_comm_overlap_cfg of Megatron, NeMo or TransformerEngine as rules"
    )
    parser.add_argument("file", help="YAML or JSON")
    parser.set_defaults(run=lambda flags: run(flags.file, as_json=flags.json))


def run(path: str, *, as_json: bool) -> int:
    """Print the rules (--json: in the form of options={"overrides": ...}), and to stderr the fields without effect here."""
    from tabulate import tabulate

    from ub_overlap.compiler.overrides.megatron import import_file

    rules, unused = import_file(path)
    if as_json:
        print(json.dumps([rule.to_dict() for rule in rules], indent=1))
    else:
        rows = [{"kind": r.kind, "phase": r.phase, "strategy": r.strategy, "modules": ", ".join(r.module)} for r in rules]
        print(tabulate(rows, headers="keys", tablefmt="simple"))
    if unused:
        print(f"without effect here: {', '.join(unused)}", file=sys.stderr)
    return 0
