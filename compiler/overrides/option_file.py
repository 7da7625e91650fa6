"""JSON and YAML files of options={"overrides": FILE}, and the error of a bad value in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError, StoredFileError
from ub_overlap.runtime.stored_file import MAX_DEPTH, parse_json, read_bytes

MAX_YAML_BYTES = 256 << 10
"""The largest YAML file. Its parser is a thousand times slower than that of JSON."""
MAX_YAML_VALUES = 50_000
"""Values of a YAML file, with those that its aliases repeat."""
_SHOWN = 200
"""Characters of a bad value that an error shows."""


def read_option_file(path: str | Path) -> Any:
    """Return the content of a JSON or YAML file. StoredFileError if it has none; YAML needs PyYAML, an optional package."""
    where, is_yaml = str(path), Path(path).suffix.lower() in (".yaml", ".yml")
    data = read_bytes(path, "a JSON or YAML file of the option 'overrides'")
    try:
        return parse_json(data, where, "YAML" if is_yaml else "JSON")
    except StoredFileError:
        if not is_yaml or not data.strip():
            raise
    if len(data) > MAX_YAML_BYTES:
        raise StoredFileError("the YAML file is too large", where=where, expected=f"at most {MAX_YAML_BYTES >> 10} KiB")
    try:
        import yaml
    except ImportError as error:
        raise StoredFileError(
            "a YAML file, and PyYAML is not installed", where=where, expected="PyYAML", fix="pip install pyyaml, or write JSON"
        ) from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = data.decode("utf-8-sig")
        _check_size(yaml, loader, text, where)
        return yaml.load(text, Loader=loader)
    except StoredFileError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise StoredFileError("not YAML", where=where, got=_short(" ".join(str(error).split())), expected="YAML") from error


def _check_size(yaml: Any, loader: Any, text: str, where: str) -> None:
    """Raise StoredFileError where the values are too many, counted as often as aliases repeat them, or too deep."""
    sizes: dict[str, int] = {}  # by anchor, of what is complete
    open_: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=loader):
        size = 0
        if isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 0)
            if any(anchor == event.anchor for anchor, _ in open_):
                raise StoredFileError("an alias refers to a value that contains it", where=where, got=f"*{event.anchor}")
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
            sizes |= {anchor: size} if anchor else {}
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            sizes |= {event.anchor: 1} if event.anchor else {}
        parent, total = open_[-1]
        open_[-1] = (parent, total + size)
        if total + size > MAX_YAML_VALUES:
            raise StoredFileError("too many values", where=where, expected=f"at most {MAX_YAML_VALUES}, with repeated aliases")
        if len(open_) > MAX_DEPTH:
            raise StoredFileError("the file is nested too deep", where=where, expected=f"at most {MAX_DEPTH} levels")


def refused(origin: str, field: str, got: Any, expected: str, fix: str = "") -> OptionError:
    """Return the error of a bad part of the option. `origin`: its file, or "". `field`: the path to the part."""
    where = ", ".join(filter(None, [origin and f"file {origin}", field and f"field {field}"]))
    return OptionError(
        what="bad value of option 'overrides'",
        where=where or "torch.compile(..., options=...)",
        got=f"{field or 'overrides'}={_short(repr(got))}",
        expected=expected,
        fix=fix,
    )


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
