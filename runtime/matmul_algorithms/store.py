"""Chosen algorithms on disk: one file per GPU model and version of cuBLASLt, in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import plan_store, stored_file
from ..errors import StoredFileError

log = logging.getLogger(__name__)

VERSION = 1
_KEY = re.compile(r"-?\d{1,18}(,-?\d{1,18}){1,63}\Z", re.ASCII)
_ALGORITHM = re.compile(r"(?:[0-9a-f]{2}){1,256}\Z")


@dataclass(frozen=True, slots=True)
class ChosenAlgorithm:
    """The fastest algorithm of a matmul. `us`, `first_us`: microseconds with it, and with the library's first proposal."""

    algorithm: bytes
    text: str
    us: float
    first_us: float

    def __str__(self) -> str:
        if self.us >= self.first_us:
            return f"{self.text}: {self.us:.4g} us, the first proposal"
        return f"{self.text}: {self.first_us:.4g} -> {self.us:.4g} us"


@dataclass(frozen=True, slots=True)
class Library:
    """What algorithms are valid for: the GPU model and the version of cuBLASLt."""

    gpu: str
    version: int


def directory() -> Path:
    """Return $UB_OVERLAP_CACHE_DIR/algorithms, else ~/.cache/ub_overlap/algorithms (XDG_CACHE_HOME as for plans)."""
    return plan_store.directory().parent / "algorithms"


def path_of(library: Library) -> Path:
    """Return the file of a library."""
    name = stored_file.as_file_name(library.gpu)
    return directory() / f"{name}-{library.version}-{hashlib.sha256(library.gpu.encode()).hexdigest()[:8]}.json"


def load(library: Library) -> dict[str, ChosenAlgorithm]:
    """Return the chosen algorithms by key of the matmul. A damaged file counts as none, and is logged."""
    try:
        path = path_of(library)
    except FileNotFoundError:  # no home folder
        return {}
    if not os.path.isfile(path):  # to open a FIFO would block for ever
        return {}
    try:
        return _parse(stored_file.read_json(path), str(path), library)
    except StoredFileError as error:
        log.warning("%s; matmuls use the library's first proposals", error.line)
        return {}


def add(library: Library, chosen: Mapping[str, ChosenAlgorithm]) -> None:
    """Add to the file, and keep what other processes wrote since."""
    rows = {
        key: {"algorithm": row.algorithm.hex(), "text": row.text, "us": row.us, "first_us": row.first_us}
        for key, row in sorted({**load(library), **chosen}.items())
    }
    content = {"version": VERSION, "gpu": library.gpu, "library": library.version, "algorithms": rows}
    try:
        stored_file.write(path_of(library), json.dumps(content, indent=1))
    except OSError as error:
        log.warning("cannot store algorithms of matmuls, the next process uses the first proposals: %s", error)


def _parse(content: Any, where: str, library: Library) -> dict[str, ChosenAlgorithm]:
    def bad(path: str, got: Any, expected: str) -> StoredFileError:
        return stored_file.bad_field(where, "a file of algorithms", path, repr(got)[: stored_file.SHOWN], expected)

    if not isinstance(content, dict):
        raise bad("", content, "an object")
    for name, expected in (("version", VERSION), ("gpu", library.gpu), ("library", library.version)):
        if content.get(name) != expected:
            raise bad(name, content.get(name), repr(expected))
    rows = content.get("algorithms")
    if not isinstance(rows, dict):
        raise bad("algorithms", rows, "an object")
    chosen = {}
    for key, row in rows.items():
        if not _KEY.match(key) or not isinstance(row, dict):
            raise bad("algorithms", key, "the key of a matmul and an object")
        algorithm, text, times = row.get("algorithm"), row.get("text"), (row.get("us"), row.get("first_us"))
        if not isinstance(algorithm, str) or not _ALGORITHM.match(algorithm):
            raise bad("algorithm", algorithm, "bytes in hexadecimal digits")
        if not isinstance(text, str):
            raise bad("text", text, "a text")
        if not all(isinstance(us, int | float) and math.isfinite(us) for us in times):
            raise bad("us", times, "microseconds")
        chosen[key] = ChosenAlgorithm(bytes.fromhex(algorithm), text, float(times[0]), float(times[1]))  # type: ignore[arg-type]
    return chosen
