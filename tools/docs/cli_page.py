"""The page of the command line, from the argparse parsers of ub_overlap.cli."""

from __future__ import annotations

import argparse

from ub_overlap.cli import build_parser
from ub_overlap.cli.parsers import PROG, Parser, all_parsers


def cli_page() -> str:
    """Return the page of all verbs."""
    top, *verbs = all_parsers(build_parser())
    return "\n\n".join([
        f"# Command line\n\n{top.description} `ub-overlap VERB` is the same as `{PROG} VERB`.",
        "Errors are one line on stderr, and an object on stdout with `--json`. `UB_OVERLAP_DEBUG=1` shows tracebacks. Tables "
        "fit the terminal; `COLUMNS` sets the width of files and pipes too. `NO_COLOR`, `FORCE_COLOR` and `TERM=dumb` are "
        "respected.",
        exit_table(top),
        argument_table(top),
        *(section(parser) for parser in verbs),
    ])  # fmt: skip


def section(parser: Parser) -> str:
    """Return the section of a verb: what it does, its usage, arguments, examples and exit codes."""
    name = parser.prog.removeprefix(PROG).strip()
    examples = "\n".join(f"    {example}" for example in parser.examples)
    parts = [f"## {name}", parser.description or "", f"    {usage(parser)}", argument_table(parser), "Examples:", examples]
    return "\n\n".join(part for part in [*parts, exit_table(parser)] if part)


def usage(parser: Parser) -> str:
    """Return the usage in one line: required arguments, and "[flags]" for the others."""
    words = [parser.launcher + parser.prog.removeprefix(PROG)]
    actions = shown(parser)
    if any(action.option_strings for action in actions):
        words.append("[flags]")
    return " ".join([*words, *(positional(action) for action in actions if not action.option_strings)])


def shown(parser: Parser) -> list[argparse.Action]:
    """Return the arguments of a parser, except --help."""
    return [action for action in parser._actions if "--help" not in action.option_strings and action.help != argparse.SUPPRESS]


def positional(action: argparse.Action) -> str:
    """Return the name of a positional argument as the usage shows it."""
    return str(action.metavar or action.dest)


def argument_table(parser: Parser) -> str:
    """Return the arguments as a table, "" without any. The verbs of a parser have sections of their own."""
    rows = []
    for action in shown(parser):
        if action.nargs == argparse.PARSER:
            continue
        meaning = " ".join((action.help or "").split()).replace("|", "\\|").replace("%%", "%")
        rows.append(f"| {spelling(action)} | {meaning} |")
    return "\n".join(["| argument | meaning |", "| --- | --- |", *rows]) if rows else ""


def spelling(action: argparse.Action) -> str:
    """Return an argument as it is typed: "`--site ID`"."""
    if not action.option_strings:
        return f"`{positional(action)}`"
    value = "" if action.nargs == 0 else str(action.metavar or (choices_of(action) or action.dest.upper()))
    return f"`{', '.join(action.option_strings)} {value}".rstrip() + "`"


def choices_of(action: argparse.Action) -> str:
    """Return the allowed values: "cuda\\|cpu"; "" if any value is allowed."""
    return "\\|".join(map(str, action.choices)) if action.choices else ""


def exit_table(parser: Parser) -> str:
    """Return the exit codes as a table."""
    return "\n".join(
        ["| exit code | meaning |", "| --- | --- |", *(f"| {code} | {meaning} |" for code, meaning in parser.exits.items())]
    )
