"""`import-cfg`: print a tp_comm_overlap_cfg as rules."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .parsers import add_verb


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "import-cfg", "print a tp_comm_overlap_cfg of Megatron, NeMo or TransformerEngine as rules", parents=[as_json],
        examples=["import-cfg overlap.yaml", "import-cfg overlap.yaml --json > rules.json"],
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="YAML or JSON")
    parser.set_defaults(run=lambda flags: run(flags.file, as_json=flags.json))


def run(path: str, *, as_json: bool) -> int:
    """Print the rules (--json: in the form of options={"overrides": ...}), and to stderr the fields without effect here."""
    from ub_overlap.compiler.overrides.megatron import import_file
    from ub_overlap.compiler.text.table import render_table
    from ub_overlap.compiler.text.terminal import output_width

    rules, unused = import_file(path)
    if as_json:
        print(json.dumps([rule.to_dict() for rule in rules], indent=1))
    else:
        rows = [{"kind": r.kind, "phase": r.phase, "strategy": r.strategy, "modules": ", ".join(r.module)} for r in rules]
        print(render_table(rows, width=output_width()))
    if unused:
        print(f"without effect here: {', '.join(unused)}", file=sys.stderr)
    return 0
