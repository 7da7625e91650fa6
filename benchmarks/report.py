"""Print tables of stored measurements: python -m benchmarks.report FILE.json... [--png [FOLDER]]"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .blocks import table as blocks
from .concurrent_matmul import table as concurrent_matmul
from .context_parallel import table as context_parallel
from .data_parallel import table as data_parallel
from .decode import table as decode
from .expert_parallel import table as expert_parallel
from .fused_kernel import table as fused_kernel
from .grouped_matmul import table as grouped_matmul
from .memory import table as memory
from .ops import table as ops
from .pipeline import table as pipeline
from .plot import draw

__all__ = ["draw", "heading", "markdown", "ops_text"]

TEXTS = {
    "ops": ops.text,
    "blocks": blocks.text,
    "memory": memory.text,
    "context_parallel": context_parallel.text,
    "data_parallel": data_parallel.text,
    "expert_parallel": expert_parallel.text,
    "fused_kernel": fused_kernel.text,
    "grouped_matmul": grouped_matmul.text,
    "pipeline": pipeline.text,
    "decode": decode.text,
    concurrent_matmul.NAME: concurrent_matmul.text,
}
ops_text = ops.text


def heading(document: dict[str, Any]) -> str:
    """Return date, hardware, versions and command of a measurement."""
    devices = document["devices"]
    kinds = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    versions = [f"torch {document['torch']}"]
    versions += [f"{key} {document[key]}" for key in ("cuda", "nccl", "driver", "commit") if document.get(key)]
    changed = " + changes" if document.get("dirty") else ""
    return f"{document['date']}, {kinds}, {', '.join(versions)}{changed}.\n`{document['command']}`"


def markdown(document: dict[str, Any]) -> str:
    """Return heading and tables. ValueError for a file that is not a measurement of ours."""
    if document.get("benchmark") not in TEXTS:
        raise ValueError(f"benchmark is {document.get('benchmark')!r}: expected one of {', '.join(TEXTS)}")
    return f"{heading(document)}\n\n{TEXTS[document['benchmark']](document, 'github')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE.json")
    parser.add_argument("--png", nargs="?", const="", help="draw FILE.png next to each file, or in this folder")
    args = parser.parse_args()
    for name in args.files:
        path = Path(name)
        try:
            document = json.loads(path.read_text())
            text = markdown(document)
        except (OSError, ValueError, KeyError) as error:
            print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        print(text, end="\n\n")
        if args.png is not None:
            folder = Path(args.png) if args.png else path.parent
            folder.mkdir(parents=True, exist_ok=True)
            print(draw(document, str(folder / f"{path.stem}.png")), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
