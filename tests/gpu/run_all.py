"""Every program of this folder, one after the other, each with a limit; all tables last.

    python tests/gpu/run_all.py 4 [--quick] [--only ops,races] [--log DIR] [--device cpu]

Ordered by what a short lease should learn first. With --quick all of it fits into about eight minutes on four GPUs. The
output of each program is kept in DIR (default: $OUT, else a temporary folder). Exit code 1 if any program failed.
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.gpu.launch import Done, python, torchrun


@dataclass(frozen=True)
class Program:
    """limit_s: as it is; quick_s: with --quick. alone: it starts its ranks by itself, and takes --ranks."""

    name: str
    limit_s: float
    quick_s: float
    alone: bool = False


PROGRAMS = (
    Program("ops", 300, 90),
    Program("races", 300, 100),
    Program("broken", 240, 75),
    Program("numerics", 180, 60),
    Program("weights", 240, 100),
    Program("delayed", 240, 100),
    Program("functions", 150, 90),
    Program("graphs", 300, 90),
    Program("recorded", 120, 50),
    Program("choices", 300, 110),
    Program("tools", 200, 100),
    Program("faults", 400, 110, alone=True),
    Program("models", 700, 150),
    Program("connections", 300, 130, alone=True),
    Program("sanitize", 700, 200, alone=True),
)


def start(program: Program, ranks: int, quick: bool, device: str) -> Done:
    arguments = ["--device", device, *(["--quick"] if quick else [])]
    limit = program.quick_s if quick else program.limit_s
    if program.alone:
        few = ["--ranks", str(min(ranks, 2) if program.name == "sanitize" else ranks)]
        return python(f"{program.name}.py", [*few, *arguments], limit)
    return torchrun(f"{program.name}.py", ranks, arguments, limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="programs by name, with commas between")
    parser.add_argument("--log", default=os.environ.get("OUT", ""), help="folder for the programs' output")
    chosen = parser.parse_args()
    folder = Path(chosen.log or tempfile.mkdtemp(prefix="ub_overlap_gpu_"))
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in chosen.only.split(",") if name]
    unknown = set(names) - {program.name for program in PROGRAMS}
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PROGRAMS)}")
    began, done = time.monotonic(), dict[str, Done]()
    for program in PROGRAMS:
        if names and program.name not in names:
            continue
        print(f"[{time.monotonic() - began:6.1f} s] {program.name} ...", flush=True)
        result = done[program.name] = start(program, chosen.ranks, chosen.quick, chosen.device)
        (folder / f"{program.name}.log").write_text(f"$ {result.command}\n{result.output}\n")
        print(f"[{time.monotonic() - began:6.1f} s] {program.name}: {result.why()}", flush=True)
        if result.code != 0:
            print("\n".join(result.output.splitlines()[-40:]), flush=True)
    for name, result in done.items():
        print(f"\n#### {name}: {result.why()}\n{result.tail(30)}", flush=True)
    bad = [name for name, result in done.items() if result.code != 0]
    print(f"\n{len(bad)} of {len(done)} programs failed{': ' + ', '.join(bad) if bad else ''}; output in {folder}", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
