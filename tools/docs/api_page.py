"""The page of the public names of `ub_overlap`, from their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType
from typing import Any

import ub_overlap

from .ops_page import docstring_as_markdown, wrap_schema
from .source_docs import signature


def api_page() -> str:
    """Return the page of all names of `ub_overlap.__all__`."""
    names = sorted((n for n in ub_overlap.__all__ if not n.startswith("__")), key=lambda n: (n[0].isupper(), n))
    parts = [f"## {name}\n\n{describe(name, getattr(ub_overlap, name))}" for name in names]
    return "# API\n\nEvery public name of `ub_overlap`. Names are imported at first use.\n\n" + "\n\n".join(parts) + "\n"


def describe(name: str, value: Any) -> str:
    """Return signature, docstring and, for classes, public members of a name."""
    text = docstring_as_markdown(inspect.getdoc(value) or "")
    if isinstance(value, ModuleType):
        members = getattr(value, "__all__", ()) if value.__package__ == ub_overlap.__name__ else ()
        parts = [f"### {name}.{member}\n\n{describe(f'{name}.{member}', getattr(value, member))}" for member in members]
        return "\n\n".join([f"Module `{value.__name__}`.", text, *parts])
    if inspect.isclass(value):
        shown = "" if issubclass(value, BaseException) else code(f"{name}{class_signature(value)}") + "\n\n"
        members = "\n".join(member_lines(value))
        return f"{shown}{text}" + (f"\n\n{members}" if members else "")
    if callable(value):
        return code(f"{name}{signature(value)}") + f"\n\n{text}"
    return text


def code(call: str) -> str:
    """Return a signature as an indented block."""
    return "\n".join(f"    {line}" for line in (wrap_schema(call) if "(" in call else [call]))


def class_signature(cls: type) -> str:
    """Return the parameters of a class, "" for one that users do not construct."""
    return signature(cls) if dataclasses.is_dataclass(cls) and not hasattr(cls, "to_json") else ""


def member_lines(cls: type) -> list[str]:
    """Return one list item for each public method and property with a docstring."""
    lines = []
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        call = value.fget if isinstance(value, property) else value
        if not inspect.isfunction(call) or not call.__doc__:
            continue
        shown = name if isinstance(value, property) else f"{name}{signature(call)}"
        lines.append(f"- `{shown}`: {' '.join(inspect.getdoc(call).split(chr(10) * 2)[0].split())}")  # type: ignore[union-attr]
    return lines
