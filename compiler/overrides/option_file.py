"""JSON and YAML files of options={"overrides": FILE}, and the error of a bad value in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError

_SHOWN = 60
"""Characters of a file that an error shows."""


def read_option_file(path: str | Path) -> Any:
    """Return the content of a JSON or YAML file. OptionError if it cannot be read; YAML needs PyYAML, an optional package."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refused("", "", str(path), "a readable JSON or YAML file", fix=str(error)) from error
    try:
        return json.loads(text)
    except ValueError as not_json:
        if Path(path).suffix.lower() not in (".yaml", ".yml"):
            raise refused(str(path), "", _start(text), "JSON", fix=str(not_json)) from not_json
    try:
        import yaml
    except ImportError as error:
        raise refused(
            str(path), "", "a YAML file, and PyYAML is not installed", "PyYAML", fix="pip install pyyaml, or write JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise refused(str(path), "", _start(text), "YAML", fix=" ".join(str(error).split())) from error


def refused(origin: str, field: str, got: Any, expected: str, fix: str = "") -> OptionError:
    """Return the error of a bad part of the option. `origin`: its file, or "". `field`: the path to the part."""
    where = ", ".join(filter(None, [origin and f"file {origin}", field and f"field {field}"]))
    return OptionError(
        what="bad value of option 'overrides'",
        where=where or "torch.compile(..., options=...)",
        got=f"{field or 'overrides'}={got!r}",
        expected=expected,
        fix=fix,
    )


def _start(text: str) -> str:
    return text[:_SHOWN] + ("..." if len(text) > _SHOWN else "")
