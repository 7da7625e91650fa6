"""`clear-cache`: remove files that this package stored in its cache folder.

    plans/      reports by plan digest, with their graphs
    compiled/   which reports belong to a graph in torch's compile cache
    tuned/      autotune results
    algorithms/ algorithms of matmuls that a search has chosen
    flight/     flight records; not those in $UB_OVERLAP_FLIGHT_DIR
    profiles/   device profiles that `calibrate` measured; removed only with --profiles, because measuring takes a machine

Only files with the names that this package gives are removed, and only in these folders. Symbolic links are never followed:
folders are opened without following links, and files are removed relative to the open folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ub_overlap.runtime import plan_store, stored_file
from ub_overlap.runtime.errors import OptionError

from .parsers import Parser, add_verb, non_negative

DIGEST = "[0-9a-f]{8,64}(?:-[0-9a-f]{1,16})?"
TEMPORARY = rf"(?:{re.escape(stored_file.TEMPORARY)}|\.plan-|\.profile-)\w+"  # the last two of earlier versions
NAMES = {
    "plans": re.compile(rf"{DIGEST}\.(json|graphs)|{TEMPORARY}"),
    "compiled": re.compile(rf"[0-9a-f]{{32}}\.json|{TEMPORARY}"),
    "tuned": re.compile(rf"{DIGEST}\.json|\.{DIGEST}\.json\.lock|{TEMPORARY}"),
    "algorithms": re.compile(rf"[a-z0-9-]+-[0-9]+-[0-9a-f]{{8}}\.json|{TEMPORARY}"),
    "flight": re.compile(rf"rank-?[0-9]+-(.+-)?[0-9]+\.json|{TEMPORARY}"),
    "profiles": re.compile(rf"\.?[a-z0-9-]+-tp\w+-[0-9a-f]{{8}}\.json(\.lock)?|{TEMPORARY}"),
}
"""Folder in the cache -> names of our files."""
IN_USE_S = 3600
"""Temporary files younger than this may belong to a process that writes them now."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file that can be removed."""

    folder: str
    name: str
    bytes: int
    modified: float


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "clear-cache", "remove stored reports, results of measurements and flight records", parents=[as_json],
        details="Results are those of autotune, and algorithms of matmuls. Device profiles stay, unless --profiles is given. "
        "Other files in the folder stay, symbolic links too.",
        examples=["clear-cache --dry-run", "clear-cache --yes", "clear-cache --older-than 30 --yes"],
        exits={0: "success, also if there is nothing to remove", 1: "not confirmed, or a file could not be removed"},
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, and remove nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--profiles", action="store_true", help="also remove device profiles that calibrate measured")
    parser.add_argument("--older-than", type=non_negative, default=0, metavar="DAYS", help="only files of at least this age")
    parser.set_defaults(run=lambda flags: run(flags, parser))


def run(flags: argparse.Namespace, parser: Parser) -> int:
    """List the files, ask, and remove them. Return 1 if the user says no, or a file stays."""
    if not (flags.dry_run or flags.yes) and (flags.json or not sys.stdin.isatty()):
        parser.error("give --yes to remove the files, or --dry-run to list them")
    root = plan_store.directory().parent
    files, skipped = find_files(root, tuple(name for name in NAMES if flags.profiles or name != "profiles"))
    before = time.time() - 86400 * flags.older_than
    files = [f for f in files if f.modified <= before]
    removed: list[CachedFile] = []
    failed: list[str] = []
    if not flags.json:
        print(describe(root, files, skipped, every_file=flags.dry_run))
    is_confirmed = flags.yes or not files or flags.dry_run or _ask(f"remove {len(files)} files?")
    if is_confirmed and not flags.dry_run:
        removed, failed = remove_files(root, files)
    if flags.json:
        rows = [{"path": str(root / f.folder / f.name), "kind": f.folder, "bytes": f.bytes} for f in files]
        print(json.dumps({
            "folder": str(root), "files": rows, "bytes": sum(f.bytes for f in files), "skipped": skipped,
            "removed": len(removed), "failed": failed,
        }))  # fmt: skip
    elif files and not flags.dry_run:
        print(f"removed {len(removed)} files, {size_text(sum(f.bytes for f in removed))}")
    for problem in failed:
        print(problem, file=sys.stderr)
    return 0 if is_confirmed and not failed else 1


def find_files(root: Path, folders: tuple[str, ...]) -> tuple[list[CachedFile], list[str]]:
    """Return our files, and why other entries stay. OptionError if the cache folder itself is a symbolic link."""
    if root.is_symlink():
        raise OptionError(
            "the cache folder is a symbolic link, which is not followed", where=str(root), got=f"-> {os.readlink(root)}",
            fix="set UB_OVERLAP_CACHE_DIR to the folder itself",
        )  # fmt: skip
    files: list[CachedFile] = []
    skipped: list[str] = []
    for folder in folders:
        path = root / folder
        if path.is_symlink():
            skipped.append(f"{path}: a symbolic link")
        elif path.is_dir():
            with _opened(path) as fd, os.scandir(fd) as entries:
                for entry in sorted(entries, key=lambda e: e.name):
                    about = entry.stat(follow_symlinks=False)
                    if reason := _reason_to_keep(folder, entry.name, about):
                        skipped.append(f"{path / entry.name}: {reason}")
                    else:
                        files.append(CachedFile(folder, entry.name, about.st_size, about.st_mtime))
    return files, skipped


def _reason_to_keep(folder: str, name: str, about: os.stat_result) -> str:
    if stat.S_ISLNK(about.st_mode):
        return "a symbolic link"
    if not stat.S_ISREG(about.st_mode) or not NAMES[folder].fullmatch(name):
        return "not a file of this package"
    if about.st_uid != os.getuid():
        return "owned by another user"
    is_temporary = re.fullmatch(TEMPORARY, name) is not None
    return "maybe in use" if is_temporary and time.time() - about.st_mtime < IN_USE_S else ""


def remove_files(root: Path, files: list[CachedFile]) -> tuple[list[CachedFile], list[str]]:
    """Remove the files. Return those that were removed, and why others were not. A missing file is not an error."""
    removed: list[CachedFile] = []
    failed: list[str] = []
    for folder in dict.fromkeys(f.folder for f in files):
        with _opened(root / folder) as fd:
            for file in (f for f in files if f.folder == folder):
                try:
                    os.unlink(file.name, dir_fd=fd)
                    removed.append(file)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    failed.append(f"{root / folder / file.name}: {error.strerror}")
    return removed, failed


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder. OSError if it became a symbolic link since it was looked at."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def describe(root: Path, files: list[CachedFile], skipped: list[str], *, every_file: bool) -> str:
    """Return the files with their sizes, one row per folder, and what stays."""
    from ub_overlap.compiler.text.table import render_table
    from ub_overlap.compiler.text.terminal import output_width

    lines = [f"{size_text(f.bytes):>10}  {root / f.folder / f.name}" for f in files] if every_file else []
    rows = []
    for folder in dict.fromkeys(f.folder for f in files):
        sizes = [f.bytes for f in files if f.folder == folder]
        rows.append({"folder": str(root / folder), "files": len(sizes), "size": size_text(sum(sizes))})
    lines.append(render_table(rows, width=output_width()) or f"nothing to remove in {root}")
    if skipped:
        lines += ["stays:", *(f"  {text}" for text in skipped)]
    return "\n".join(lines)


def size_text(count: float) -> str:
    """Return a number of bytes with a unit: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _ask(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
