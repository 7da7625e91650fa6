"""`completion`: print a script that completes verbs, flags and files in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from .parsers import Parser, add_verb, all_parsers

SHELLS = ("bash", "zsh", "tcsh")
COMMAND = "ub-overlap"


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "completion", f"print a script that completes {COMMAND} in a shell",
        examples=["completion bash > ~/.local/share/bash-completion/completions/ub-overlap"],
    )  # fmt: skip
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    print(complete(flags.parser, flags.shell))
    return 0


def complete(parser: Parser, shell: str) -> str:
    """Return the script for a parser and its verbs. A value without choices is completed as the name of a file.

    It completes the installed command: shells cannot complete `python -m ub_overlap`.
    """
    import shtab

    parser.prog = COMMAND
    for action in (action for each in all_parsers(parser) for action in each._actions):
        if action.nargs != 0 and not action.choices:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))
