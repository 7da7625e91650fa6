"""Parsers of the command line: one-line usage errors, help with an example, and types of file arguments.

`Parser` objects keep what their help shows (summary, examples, exit codes), so that tools/docs writes docs/reference/cli.md
from the same data.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

PROG = "python -m ub_overlap"


class UsageError(Exception):
    """Bad usage of a command. The message names the command and its help."""


class HelpFormatter(argparse.HelpFormatter):
    """Wraps descriptions and keeps the lines of an epilog."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(("examples:", "exit codes:")):
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError. `examples`: command lines without PROG. `exits`: exit code -> meaning."""

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        launcher: str = PROG,
        exits: dict[int, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.launcher = launcher
        self.examples = [f"{launcher} {example}".rstrip() for example in examples]
        self.exits = dict(exits or {})
        self.verbs: dict[str, Parser] = {}
        kwargs.setdefault("formatter_class", HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation breaks when a flag is added
        super().__init__(*args, epilog=self._epilog(), **kwargs)

    def _epilog(self) -> str:
        lines = ["examples:", *(f"  {e}" for e in self.examples)] if self.examples else []
        lines += ["", "exit codes:", *(f"  {code}  {meaning}" for code, meaning in self.exits.items())] if self.exits else []
        return "\n".join(lines).lstrip("\n")

    def error(self, message: str) -> NoReturn:
        """Raise UsageError. A verb or flag that is close to a known one is suggested."""
        if near := self._close_to(message):
            message += f"; did you mean {near}?"
        raise UsageError(f"{self.prog}: error: {message}; see: {self.prog} --help")

    def _close_to(self, message: str) -> str:
        """Return the known verb or flag that is closest to the one that argparse refused, "" without any."""
        refused = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        actions = [action for parser in all_parsers(self) for action in parser._actions]
        known = [name for action in actions for name in (*action.option_strings, *(action.choices or ()))]
        near = difflib.get_close_matches((refused[1] or refused[2]).partition("=")[0], known, n=1) if refused else []
        return near[0] if near else ""


def add_verb(
    verbs: Any,
    name: str,
    summary: str,
    *,
    examples: Sequence[str],
    exits: dict[int, str] | None = None,
    details: str = "",
    parents: Sequence[argparse.ArgumentParser] = (),
    launcher: str = PROG,
    usage: str | None = None,
) -> Parser:
    """Add the parser of a verb. `summary`: a phrase without a period. `exits`: codes other than those of bad usage.

    `usage`: instead of argparse's.
    """
    codes = {2: "bad usage, or a file that cannot be read", **(exits or {0: "success"})}
    parser: Parser = verbs.add_parser(
        name,
        parents=list(parents),
        help=summary,
        description=" ".join(filter(None, [f"{summary[0].upper()}{summary[1:]}.", details])),
        examples=examples,
        exits=dict(sorted(codes.items())),
        launcher=launcher,
        usage=usage,
    )
    return parser


def all_parsers(parser: Parser) -> list[Parser]:
    """Return a parser and all parsers of its verbs, each before its own verbs."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for verb in action.choices.values() for inner in all_parsers(verb)]
    return found


def output_file(text: str) -> Path:
    """Return the path of a file that can be written: the type of an argument."""
    path = Path(text)
    folder = path.parent
    if not text:
        raise argparse.ArgumentTypeError("give a file")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: no permission")
    return path


def input_file(text: str) -> Path:
    """Return the path of a file that can be read: the type of an argument."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give a file")
    if not path.exists():
        raise argparse.ArgumentTypeError(f"file not found: {text!r}")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: no permission")
    return path


def input_path(text: str) -> Path:
    """Return the path of a file or folder that can be read: the type of an argument."""
    return Path(text) if Path(text).is_dir() and os.access(text, os.R_OK | os.X_OK) else input_file(text)


def input_folder(text: str) -> Path:
    """Return the path of a folder: the type of an argument."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is a file; give a folder" if path.exists() else f"folder not found: {text!r}"
        )
    return path


def positive(text: str) -> float:
    """Return a number above 0: the type of an argument."""
    return _number(text, float, lambda value: value > 0, "a number above 0")


def non_negative(text: str) -> float:
    """Return a number of at least 0: the type of an argument."""
    return _number(text, float, lambda value: value >= 0, "a number of at least 0")


def non_negative_int(text: str) -> int:
    """Return an integer of at least 0: the type of an argument."""
    return int(_number(text, int, lambda value: value >= 0, "an integer of at least 0"))


def _number(text: str, kind: Callable[[str], float], valid: Callable[[float], bool], expected: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and valid(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value
