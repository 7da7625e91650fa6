"""Time a persistent matmul that waits for its shards against cuBLAS in pieces. One Hopper GPU, nvcc, CUTLASS's headers.

    python -m benchmarks.gated_matmul --cutlass FOLDER [--library FILE] [--parts ...] [--json OUT]

FOLDER holds include/ and tools/util/include/ of CUTLASS 4.2 (cutlass_library/source of the wheel nvidia-cutlass). The library
is built unless it exists. QuACK (quack-kernels) takes part where it can be imported. Each shape: kernels are picked by short
runs, then all variants are CUDA graphs whose replays alternate in random order; medians of --rounds.

speed       kernels against cuBLAS, whole and shard by shard, nothing waits; they alternate
steady      the same, and the fastest of cuBLASLt's proposals; each alone until the clocks are its own
arrivals    shards arrive at --rate GB/s while a matmul runs: pieces behind waits, and gated kernels
arrivals_steady   the same, each alone until the clocks are its own, with the kernels that a run of arrivals took (--found)
departures  shards of the result leave at --rate GB/s: pieces, and kernels that count stored tiles
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .algorithms import Algorithms
from .arrivals import HostLink
from .arrivals import measure as measure_arrivals
from .departures import measure as measure_departures
from .departures import outward_link
from .engines import quack
from .library import KernelLibrary, build
from .shapes import MODELS, Shape, shapes
from .speed import measure as measure_speed
from .steady import measure as measure_steady
from .steady import measure_arrivals as measure_arrivals_steady
from .table import text


def facts() -> dict[str, Any]:
    """Return metadata. Nothing of the package is imported: its extension need not be built."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    return {
        "benchmark": "gated_matmul",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "command": f"python -m benchmarks.gated_matmul {' '.join(sys.argv[1:])}",
    }


def rounded(value: Any) -> Any:
    """Return `value` with floats rounded to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cutlass", default="")
    parser.add_argument("--library", type=Path, default=Path("build/gated_matmul/libgated.so"))
    parser.add_argument("--parts", default="speed,steady,arrivals,departures")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--rows", default="4096,8192,16384", help="M, of all ranks")
    parser.add_argument("--rate", type=float, default=349.0, help="GB/s of the link that is simulated")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after this time")
    parser.add_argument("--only", help="only shapes with this in their name")
    parser.add_argument("--found", type=Path, help="JSON of a run of arrivals")
    parser.add_argument("--no-quack", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    document: dict[str, Any] = {**facts(), "rate": args.rate, "rounds": args.rounds}
    begin = time.monotonic()
    if not args.library.exists():
        document["not_built"] = build(args.cutlass, args.library)
        print(f"built in {time.monotonic() - begin:.0f} s, without {document['not_built']}", flush=True)
    library = KernelLibrary(args.library)
    other = None if args.no_quack else quack()
    parts = args.parts.split(",")
    link = HostLink.measure(library)
    document["host_link"] = vars(link)
    outwards = outward_link(library)
    document["host_link_outwards"] = vars(outwards)
    print(document, flush=True)
    algorithms = Algorithms(args.library.parent)
    found = {Shape(**row["shape"]): row for row in json.loads(args.found.read_text())["arrivals"]} if args.found else {}
    measures: dict[str, Callable[[Shape], dict[str, Any]]] = {
        "speed": lambda shape: measure_speed(shape, library, other, args.rounds),
        "steady": lambda shape: measure_steady(shape, library, other, algorithms, 3),
        "arrivals": lambda shape: measure_arrivals(shape, library, other, algorithms, link, args.rate, args.rounds),
        "arrivals_steady": lambda shape: measure_arrivals_steady(shape, library, link, args.rate, found[shape]["us"], 2),
        "departures": lambda shape: measure_departures(shape, library, outwards, args.rate, args.rounds),
    }
    ranks, rows = ([int(size) for size in sizes.split(",")] for sizes in (args.ranks, args.rows))
    for part in parts:
        document[part] = []
        for shape in shapes(args.models.split(","), ranks, rows):
            if part not in ("speed", "steady") and shape.gathers != (part != "departures"):
                continue
            if args.only and args.only not in shape.name:
                continue
            if time.monotonic() - begin > args.seconds:
                document.setdefault("not_run", []).append(f"{part} {shape.name}")
                continue
            try:
                row = measures[part](shape)
            except (AssertionError, RuntimeError) as error:
                row = {"shape": vars(shape), "failed": f"{type(error).__name__}: {error}"}
                print(f"{part} {shape.name}: {row['failed']}", flush=True)
            document[part].append(rounded(row))
            torch.cuda.empty_cache()
            if args.json:
                args.json.write_text(json.dumps(rounded(document), indent=1) + "\n")
    print(f"{time.monotonic() - begin:.0f} s")
    print(text(document))


if __name__ == "__main__":
    main()
