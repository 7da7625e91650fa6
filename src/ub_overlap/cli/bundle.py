"""`doctor --bundle FILE.zip`: one file for a bug report.

    doctor.txt, doctor.json     what works on this machine: versions, devices, our environment variables, settings
    packages.txt                installed packages
    plans/DIGEST.json, .graphs  stored plans with their graphs: the newest, or those of --plan
    reports/, logs/             the files of --report, and the ends of the files of --log, which may be folders
    contents.txt                this list

Secrets are redacted in texts. Plans are copied as they are: they contain source lines of the model.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ub_overlap.runtime import stored_file

from .redact import redact_text
from .report_path import find_stored, stored_paths

MAX_LOG = 256 << 10
"""Bytes of the end of a log."""
MAX_FILE = 64 << 20
"""Larger plans and graphs are left out."""
MAX_LOGS = 64
"""Files of a folder of logs; the newest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the bundle."""

    name: str
    about: str
    data: bytes


def write_bundle(path: Path, facts: dict[str, Any], text: str, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Write the bundle and return its contents: name, bytes, about. The file appears complete or not at all.

    Other users cannot read it, as plans contain source lines."""
    files = [
        Entry("doctor.txt", "doctor", redact_text(text).encode()),
        Entry("doctor.json", "doctor, for programs", redact_text(json.dumps(facts, default=str, indent=1)).encode()),
        Entry("packages.txt", "installed packages", "".join(f"{line}\n" for line in installed_packages()).encode()),
        *entries,
    ]
    contents = [{"name": e.name, "bytes": len(e.data), "about": e.about} for e in files]
    listing = "".join(f"{row['bytes']:>10}  {row['name']}  ({row['about']})\n" for row in contents)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("contents.txt", f"ub_overlap bug report, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n\n{listing}")
        for entry in files:
            archive.writestr(entry.name, entry.data)
    stored_file.write(path, packed.getvalue())
    return contents


def installed_packages() -> list[str]:
    """Return "name==version" of all packages. Unlike pip freeze it has no URLs, which may contain passwords."""
    named = {str(d.metadata["Name"]): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return [f"{name}=={version}" for name, version in sorted(named.items(), key=lambda item: item[0].lower())]


def plan_entries(digests: Sequence[str], newest: int) -> Iterator[Entry]:
    """Yield the plans whose digests begin with one of `digests`, else the newest plans. OptionError for an unknown digest."""
    paths = [path for digest in digests for path in find_stored(digest)] if digests else stored_paths()[:newest]
    for path in dict.fromkeys(paths):
        for file, about in ((path, "a stored plan"), (path.with_suffix(".graphs"), "its graphs, packed")):
            if file.is_file() and file.stat().st_size <= MAX_FILE:
                yield Entry(f"plans/{file.name}", about, file.read_bytes())


def file_entries(reports: Sequence[Path], logs: Sequence[Path]) -> Iterator[Entry]:
    """Yield the files that the user names. Equal names get a number."""
    used: dict[str, int] = {}

    def name(folder: str, path: Path) -> str:
        full = f"{folder}/{path.name}"
        used[full] = used.get(full, 0) + 1
        return full if used[full] == 1 else f"{folder}/{used[full]}-{path.name}"

    for path in reports:
        yield Entry(name("reports", path), "a report", path.read_bytes())
    for given in logs:
        folder = f"logs/{given.name}" if given.is_dir() else "logs"
        for path in newest_files(given) if given.is_dir() else [given]:
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_LOG))
                data = file.read(MAX_LOG)
            about = "a log" if size <= MAX_LOG else f"the last {MAX_LOG >> 10} KiB of a log"
            yield Entry(name(folder, path), about, redact_text(data.decode(errors="replace")).encode())


def newest_files(folder: Path) -> list[Path]:
    """Return the newest files of a folder by name, without those of its folders and without symbolic links."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    return sorted(sorted(files, key=lambda path: -path.stat().st_mtime)[:MAX_LOGS])
