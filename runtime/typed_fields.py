"""Dataclass fields with a check, the allowed values and one line of documentation.

Options (compiler/options.py) and settings (settings.py) are declared with these fields. Their checks, error texts and tables
are generated from them, so each fact is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Check:
    """A test of one value. `convert` returns the value to keep, or raises ValueError. `expected` describes valid values."""

    expected: str
    convert: Callable[[Any], Any]


def typed_field(default: Any, doc: str, check: Check | None = None, values: str = "") -> Any:
    """Return a dataclass field.

    `doc`: its meaning in one line. `check`: None where the annotation is bool or Literal, which imply it. `values`: the
    allowed values as the table shows them, default first; "" where the annotation implies them.
    """
    return field(default=default, metadata={"doc": doc, "check": check, "values": values})


def one_of(choices: Sequence[Any]) -> Check:
    """Return the check of a closed set of values. 1 is not True."""

    def convert(value: Any) -> Any:
        if not any(value is c or (isinstance(c, str) and value == c) for c in choices):
            raise ValueError
        return value

    return Check("one of " + ", ".join(map(repr, choices)), convert)


def integer_from(least: int) -> Check:
    """Return the check of integers of at least `least`."""

    def convert(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError
        return value

    return Check(f"an integer of at least {least}", convert)


def number(expected: str, is_valid: Callable[[float], bool]) -> Check:
    """Return the check of numbers for which `is_valid` holds."""

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_valid(value):
            raise ValueError
        return float(value)

    return Check(expected, convert)


def optional(check: Check) -> Check:
    """Return `check` extended by None."""
    return Check(f"None, or {check.expected}", lambda value: None if value is None else check.convert(value))


@cache
def checks_of(cls: type) -> Mapping[str, Check]:
    """Return the check of each typed field of a dataclass, by name."""
    hints = get_type_hints(cls)
    return {f.name: f.metadata["check"] or one_of(_choices(f, hints[f.name])) for f in _typed_fields(cls)}


def check_values(cls: type, values: Mapping[str, Any], refuse: Callable[[str, Any, str], Exception]) -> dict[str, Any]:
    """Return `values` (by field name) as the checks of `cls` convert them.

    Raises `refuse(name, value, expected)` for an invalid value. An error with a text of its own passes unchanged.
    """
    converted = {}
    for name, value in values.items():
        check = checks_of(cls)[name]
        try:
            converted[name] = check.convert(value)
        except ValueError as error:
            if error.args:
                raise
            raise refuse(name, value, check.expected) from None
    return converted


def describe_fields(cls: type) -> list[tuple[str, str, str]]:
    """Return (name, allowed values with the default first, meaning) of each typed field, in order."""
    hints = get_type_hints(cls)
    return [(f.name, f.metadata["values"] or _shown(_choices(f, hints[f.name])), f.metadata["doc"]) for f in _typed_fields(cls)]


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; "|" in cells is escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _typed_fields(cls: type) -> list[Field[Any]]:
    return [f for f in fields(cls) if "doc" in f.metadata]


def _choices(f: Field[Any], hint: Any) -> list[Any]:
    """Return the values that an annotation bool or Literal allows, default first."""
    choices = get_args(hint) if get_origin(hint) is Literal else (True, False)
    return sorted(choices, key=lambda choice: choice != f.default)


def _shown(choices: Sequence[Any]) -> str:
    return ", ".join(f'`"{c}"`' if isinstance(c, str) else f"`{c}`" for c in choices)
