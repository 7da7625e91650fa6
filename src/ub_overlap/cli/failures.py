"""Failures of a command: one line on stderr, an exit code, and with --json one object on stdout.

0    success
1    the verb found a problem, or the disk is full
2    bad usage, or a file that cannot be read
3    an error inside this package
130  interrupted
141  the reader of a pipe ended (| head)
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ub_overlap.runtime.errors import OptionError, UbOverlapError

from .parsers import UsageError

FOUND, USAGE, INTERNAL, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of a disk. Another command line would not help."""


def guarded(body: Callable[[], int], prog: str, *, as_json: bool, show_traceback: bool) -> int:
    """Run `body` and return its exit code. A failure becomes one line on stderr; SystemExit(2) for bad usage."""
    try:
        try:
            return body()
        finally:  # also after --help, which raises SystemExit
            if sys.stdout is not None:  # it is None if the caller closed it
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        if as_json:
            _print_json({"error": {"type": "KeyboardInterrupt", "what": "interrupted"}, "exit_code": INTERRUPTED})
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  (the command line never shows a traceback by itself)
        code, line, fields = describe(error)
        if show_traceback:
            traceback.print_exc()
        print(line if isinstance(error, UsageError) else f"{prog}: error: {line}", file=sys.stderr)
        if as_json:
            _print_json({"error": fields, "exit_code": code})
        _discard_output()
        if isinstance(error, UsageError):
            raise SystemExit(code) from None
        return code


def _discard_output() -> None:
    """Send what stdout cannot write to the null device: Python flushes stdout once more at its exit."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(answer: dict[str, Any]) -> None:
    with suppress(OSError):  # the error may be that of stdout
        print(json.dumps(answer), flush=True)


def describe(error: Exception) -> tuple[int, str, dict[str, str]]:
    """Return an error's exit code, its line of text, and its fields for JSON."""
    fields = {"type": type(error).__name__}
    if isinstance(error, UbOverlapError):
        names = ("where", "got", "expected", "fix")
        parts = {name: " ".join(str(getattr(error, name)).split()) for name in names}
        known = {name: text for name, text in parts.items() if text}
        line = "; ".join([" ".join(error.what.split()), *(f"{name}: {text}" for name, text in known.items())])
        return USAGE if isinstance(error, OptionError) else FOUND, line, {**fields, "what": error.what, **known}
    text = " ".join(str(error).split())
    fields["what"] = text
    if isinstance(error, UsageError):
        return USAGE, text, fields
    if isinstance(error, OSError):
        is_of_machine = error.errno in _FULL or isinstance(error, ConnectionError | TimeoutError)
        return FOUND if is_of_machine else USAGE, text, fields
    if isinstance(error, ImportError):
        return FOUND, f"{text}; what works here: python -m ub_overlap doctor", fields
    hint = "UB_OVERLAP_DEBUG=1 shows the traceback; python -m ub_overlap doctor --bundle FILE.zip collects what a report needs"
    return INTERNAL, f"internal error: {type(error).__name__}: {text}; {hint}", fields


def make_output_safe() -> None:
    """Let stdout escape characters that its encoding lacks, instead of raising UnicodeEncodeError. stderr already does."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and getattr(sys.stdout, "errors", "") == "strict":
        reconfigure(errors="backslashreplace")
