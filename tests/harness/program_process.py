"""The process of a rank of a program (programs.py). This module imports nothing of ub_overlap."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_as_main(program: str, is_script: bool, arguments: list[str], folder: str, output: str) -> None:
    """Run the program as `__main__`, with its output in a file, and end the process as Python ends.

    But modules and objects are not destroyed.
    """
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(folder)
    sys.argv = [program, *arguments]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # of a process that is killed, too
    if is_script:  # it sees what is installed and what is next to it, not what tests import
        sys.path[:] = [str(Path(program).parent), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    else:
        sys.path.insert(0, folder)
    code = 1
    try:
        if is_script:
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        if isinstance(ending.code, int) or ending.code is None:
            code = ending.code or 0
        else:
            print(ending.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (as Python does at the end of a program)
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
