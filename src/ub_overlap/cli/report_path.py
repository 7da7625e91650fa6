"""Reports and plans as arguments: a file, or the digest of a stored one, or its first digits."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from pathlib import Path

from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import OptionError

HELP = "a file of Report.to_json(), or a stored report: its file, its digest, or the first digits"
_DIGITS = re.compile(r"[0-9a-f]*(-[0-9a-f]*)?\Z")
MOST_NAMED = 4
"""Digests that an error names."""


def report_path(text: str) -> Path:
    """Return the file that `text` names, or that of the one stored report whose digest begins with it.

    OptionError where no report or several have that digest. Another name is returned as it is: who reads it says what is wrong.
    """
    if os.path.lexists(text) or not _DIGITS.match(text):
        return Path(text)
    paths = find_stored(text)
    if len(paths) > 1:
        named = ", ".join(path.stem for path in paths[:MOST_NAMED]) + (", ..." if len(paths) > MOST_NAMED else "")
        raise OptionError(
            f"{len(paths)} stored reports begin with it", where=str(plan_store.directory()), got=repr(text), expected=named,
            fix="give more digits",
        )  # fmt: skip
    return paths[0]


def plan_file(text: str) -> Path:
    """Return the file of `report_path`: the type of an argument."""
    from .parsers import input_file

    try:
        return input_file(str(report_path(text)))
    except OptionError as error:
        raise argparse.ArgumentTypeError(" ".join(str(error).split())) from error


def find_stored(prefix: str) -> list[Path]:
    """Return the files of the stored reports whose digests begin with `prefix`, newest first. OptionError without any."""
    stored = stored_paths()
    found = [path for path in stored if path.stem.startswith(prefix)]
    if found:
        return found
    try:
        where = str(plan_store.directory())
    except FileNotFoundError as error:
        what, fix = "no stored reports: there is no home folder", "set UB_OVERLAP_CACHE_DIR"
        raise OptionError(what, got=repr(prefix), fix=fix) from error
    beginnings = {path.stem[: len(prefix)]: path.stem for path in reversed(stored)}
    near = difflib.get_close_matches(prefix, beginnings, n=1)
    meant = f"did you mean {beginnings[near[0]]}? " if near else ""
    raise OptionError(
        "no stored report with this digest, and no such file", where=where, got=repr(prefix),
        fix=f"{meant}python -m ub_overlap report list shows all",
    )  # fmt: skip


def stored_paths() -> list[Path]:
    """Return the files of all stored reports, newest first. A user without a home folder has none."""
    try:
        folder = plan_store.directory()
    except FileNotFoundError:
        return []
    paths = [p for p in folder.glob("*.json") if plan_store.is_digest(p.stem) and p.is_file()] if folder.is_dir() else []
    return sorted(paths, key=lambda path: (-path.stat().st_mtime, path.name))
