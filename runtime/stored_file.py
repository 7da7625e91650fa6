"""Files that this package stores and reads: plans, graphs, reports, profiles, tuning results, rules.

    write      atomic and durable: a reader sees the old content or the new, also after a crash of the machine
    read       bounded in bytes, depth and digits
    validate   against a type, by msgspec; a bad value is named by its path, e.g. sites[3].ranks

A file may be damaged, of another version, or made to harm. Every failure is a StoredFileError with the file's name. Control
characters in texts, which a terminal would obey, are read as their escapes ("\\u001b"). msgspec is imported by `validate` only:
nothing that a compilation reads needs it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import zlib
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from .errors import StoredFileError

T = TypeVar("T")

TEMPORARY = ".ub_overlap-"
"""The names of files that are being written begin with it. A process that is killed leaves one."""
MAX_BYTES = 256 << 20
"""The largest file, and the largest inflated content, that is read."""
MAX_DEPTH = 64
"""The deepest nesting of JSON. Reports need 7."""
MAX_DIGITS = 18
"""The longest integer. Longer ones do not fit in 64 bits."""
SHOWN = 80
"""Characters of a bad value that an error shows."""

_UNSAFE = re.compile(
    r"\\\\"  # a backslash: what follows it is text
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # one character in two halves
    r"|(?P<escape>\\u(?:00[01][0-9a-fA-F]|007[fF]|00[89][0-9a-fA-F]|[dD][89a-fA-F][0-9a-fA-F]{2}|202[a-eA-E]|206[6-9])|\\[bfr])"
    r"|(?P<raw>[\x7f-\x9f\u202a-\u202e\u2066-\u2069])"
)
"""In the text of JSON: control characters, lone halves of characters, and marks that reverse the direction of writing."""


def write(path: Path, data: bytes | str) -> Path:
    """Replace `path` by `data`. OSError if that fails; then the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data if isinstance(data, bytes) else data.encode())
            f.flush()
            os.fsync(fd)  # else a crash may leave the new name without the content
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return path


def remove_oldest(folder: Path, name: re.Pattern[str], most_files: int, most_bytes: int, young_s: float = 0.0) -> None:
    """Remove the oldest files of `folder` whose names match, until no more than `most_files` and `most_bytes` are left.

    Files of the last `young_s` seconds stay. Other processes may do the same at the same time. No error is raised.
    """
    files: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for file in folder.iterdir():
            if name.fullmatch(file.name):
                with suppress(OSError):
                    status = file.lstat()
                    files.append((status.st_mtime, status.st_size, file))
    files.sort(reverse=True)
    total, before = 0, time.time() - young_s
    for number, (changed, size, file) in enumerate(files):
        total += size
        if (number >= most_files or total > most_bytes) and changed < before:
            with suppress(OSError):
                file.unlink()


def as_file_name(text: str) -> str:
    """Return `text` in letters, digits and hyphens, for the beginning of a file's name; "unknown" if nothing is left."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def read_bytes(path: str | Path, expected: str = "") -> bytes:
    """Return the content of a file. `expected`: what it should be, for the error."""
    try:
        with open(path, "rb") as f:
            data = f.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise StoredFileError("file not found", where=str(path), expected=expected) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise StoredFileError("the file cannot be read", where=str(path), got=reason, expected=expected) from error
    if len(data) > MAX_BYTES:
        raise StoredFileError("the file is too large", where=str(path), expected=f"at most {MAX_BYTES >> 20} MiB")
    return data


def read_json(path: str | Path, expected: str = "") -> Any:
    """Return the JSON in a file."""
    return parse_json(read_bytes(path, expected), str(path), expected)


def parse_json(data: bytes | str, where: str, expected: str = "JSON") -> Any:
    """Return the value of JSON. `where`: its file or origin."""
    if not data.strip():
        raise StoredFileError("the file is empty", where=where, expected=expected)
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(_UNSAFE.sub(_escaped, text), parse_int=_bounded_int)
    except RecursionError:
        raise _too_deep(where) from None
    except json.JSONDecodeError as error:
        # The end of the text where a value should go on: the rest of the file is missing.
        is_cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        what = "the file is truncated" if is_cut else "the file is damaged: not JSON"
        raise StoredFileError(what, where=where, got=f"{error.msg}, line {error.lineno}", expected=expected) from error
    except ValueError as error:
        raise StoredFileError(
            "the file is damaged: not JSON", where=where, got=_short(str(error)), expected=expected
        ) from error
    level = [value]
    for _ in range(MAX_DEPTH):
        rows = chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [v for v in rows if isinstance(v, dict | list)] if isinstance(value, dict | list) else []
        if not level:
            return value
    raise _too_deep(where)


def inflate(data: bytes, where: str, limit: int | None = None) -> bytes:
    """Return zlib data decompressed. `limit`: its largest size; MAX_BYTES without."""
    limit = MAX_BYTES if limit is None else limit
    if not data:
        raise StoredFileError("the file is empty", where=where)
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(data, limit)
        is_more = bool(inflater.unconsumed_tail) and bool(inflater.decompress(inflater.unconsumed_tail, 1))
    except zlib.error as error:
        raise StoredFileError("the file is damaged: not compressed data", where=where, got=str(error)) from error
    if is_more:
        raise StoredFileError("the file is too large", where=where, expected=f"at most {limit >> 20} MiB decompressed")
    if not inflater.eof:
        raise StoredFileError("the file is truncated", where=where, got=f"{len(data)} bytes of compressed data")
    return content


class CheckedText(str):
    """A text with a form of its own, as a type of a record. `check` raises ValueError for other texts."""

    @classmethod
    def check(cls, text: str) -> None:
        raise NotImplementedError


def validate(value: Any, record: type[T], where: str, what: str) -> T:
    """Return `value` as a `record`, a TypedDict: its fields only. `what`: what the file should be, e.g. "a plan"."""
    import msgspec

    try:
        return msgspec.convert(value, record, dec_hook=_checked)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").lstrip(".")
        raise bad_field(where, what, path, f"{_value_at(value, path)}", problem.replace("`", "")) from None


def bad_field(where: str, what: str, path: str, got: str, problem: str) -> StoredFileError:
    """Return the error for one field of a record. `problem`: what was expected, in words."""
    named = f"field {path}" if path else "the whole file"
    return StoredFileError(f"not {what}: {named}", where=where, got=got, expected=_short(problem))


def _checked(record: type, value: Any) -> Any:
    if not issubclass(record, CheckedText):
        raise NotImplementedError(record)
    if not isinstance(value, str):
        raise ValueError(f"Expected str, got {type(value).__name__}")
    record.check(value)
    return record(value)


def _value_at(value: Any, path: str) -> str:
    """Return the value at a path of msgspec, as text. "" where the path has a step of unknown name."""
    for key, index in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
        try:
            value = value[key] if key else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return ""
    return _short(repr(value)) if not isinstance(value, dict | list) else ""


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _escaped(match: re.Match[str]) -> str:
    if match["raw"]:
        return f"\\\\u{ord(match[0]):04x}"
    return "\\" + match[0] if match["escape"] else match[0]


def _bounded_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits, expected at most {MAX_DIGITS}")
    return int(text)


def _too_deep(where: str) -> StoredFileError:
    return StoredFileError("the file is nested too deep", where=where, expected=f"at most {MAX_DEPTH} levels")
