"""List the mutations, or run the tests that are to notice them (tests/mutations/overlay.py says how)."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from .catalogue import AREAS, SURVIVORS
from .mutation import ROOT, Mutation
from .overlay import Overlay
from .runs import CAUGHT, TestRunner, Verdict, check_without, try_mutation


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="print name, file and fault of each mutation")
    running = verbs.add_parser("run", help="apply each in turn, and run its tests; exit code 1 where one is not noticed")
    for verb in (listing, running):
        verb.add_argument("names", nargs="*", metavar="NAME", help="names, patterns, or areas; default: all")
    running.add_argument("--whole", action="store_true", help="run all that `make test` runs where the named tests pass")
    running.add_argument("--tree", type=Path, default=ROOT, help="the checkout to test, by default that of this program")
    running.add_argument("--objects", type=Path, default=ROOT / "build/sdist/tree", help="the compiled C++ files")
    running.add_argument("--pytest", default="--tier test", metavar="ARGS", help="what `make test` runs (default: --tier test)")
    running.add_argument("--limit", type=float, default=900.0, metavar="S", help="seconds for the tests of one mutation")
    running.add_argument("--no-check", action="store_true", help="do not run the tests that failed without any mutation, too")
    running.add_argument("--json", type=Path, default=ROOT / "build/mutations.json", help="file of the table")
    flags = parser.parse_args(argv)
    chosen = choose(flags.names)
    if not chosen:
        parser.error(f"no mutation is named {', '.join(flags.names)}")
    if flags.verb == "list":
        print("\n".join(f"{m.name:48} {m.file:44} {m.fault}" for m in chosen))
        print(f"{len(chosen)} mutations of {len({m.file for m in chosen})} files")
        return 0
    return run(chosen, flags)


def choose(names: Sequence[str]) -> list[Mutation]:
    """Return the mutations of these names, patterns or areas; of no names, all but the known survivors."""
    every = [(area, m) for area, mutations in AREAS.items() for m in mutations]
    if not names:
        return [m for _, m in every]
    every += [("survivors", m) for m in SURVIVORS]
    return [m for area, m in every if any(fnmatch(m.name, name) or name == area for name in names)]


def run(chosen: Sequence[Mutation], flags: argparse.Namespace) -> int:
    """Run the tests of each mutation, then those that failed without any. Print and write a table."""
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="ub_overlap_mutations_") as folder:
        overlay = Overlay(flags.tree.resolve(), Path(folder), flags.objects.resolve())
        overlay.check()
        with TestRunner(overlay, shlex.split(flags.pytest), flags.limit) as runner:
            for mutation in chosen:
                verdicts.append(try_mutation(runner, mutation, flags.whole))
                print(row(verdicts[-1]), flush=True)
                write(verdicts, flags.json)
            checked = verdicts if flags.no_check else check_without(runner, verdicts)
    for before, after in zip(verdicts, checked, strict=True):
        if before != after:
            print(row(after))
    write(checked, flags.json)
    missed = [v.name for v in checked if v.status != CAUGHT]
    print(f"{len(checked) - len(missed)} of {len(checked)} caught" + (f"; not: {', '.join(missed)}" if missed else ""))
    return int(bool(missed))


def row(v: Verdict) -> str:
    """Return a line of the table."""
    return f"{v.status:8} {v.name:48} {v.seconds:6.1f} s  {v.by or v.why}"


def write(verdicts: Sequence[Verdict], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([v.to_dict() for v in verdicts], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
