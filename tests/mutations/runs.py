"""Run tests against the copy of the package, with a mutation and without."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .mutation import Mutation
from .overlay import Overlay

CAUGHT, SURVIVED, ERROR = "caught", "survived", "error"
WHOLE = ("tests",)
"""Of these, what --pytest selects."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::\w+(?:\[.*?\](?= - |$))?|\S+\.py)(?: - .*)?$", re.MULTILINE)
_NO_TESTS = 5
"""Exit code of pytest where it has run none."""


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of pytest. `code`: its exit code, None where it took too long."""

    __test__ = False

    code: int | None
    failed: tuple[str, ...]
    seconds: float
    output: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutation. `by`: the test that failed. `why`: of an error."""

    name: str
    file: str
    fault: str
    status: str
    by: str = ""
    seconds: float = 0.0
    why: str = ""
    whole: bool = False
    """Only the whole selection noticed it."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class TestRunner:
    """Runs pytest in the overlay's checkout, by a process that has imported torch (server.py)."""

    __test__ = False

    def __init__(self, overlay: Overlay, selection: Sequence[str], limit_s: float) -> None:
        self.overlay, self.limit_s = overlay, limit_s
        self._arguments = ["-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout", "300"]
        self._arguments += selection
        command = [sys.executable, str(Path(__file__).with_name("server.py"))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (overlay.folder / "warnings").open("w") as warnings:  # of ranks, all runs together
            self._server = subprocess.Popen(command, cwd=overlay.tree, env=overlay.environment, stderr=warnings, **pipes)

    def __enter__(self) -> TestRunner:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def run(self, tests: Sequence[str], stops: bool = True, limit_s: float | None = None) -> TestRun:
        """Run tests. `stops`: at the first failure."""
        began, output = time.monotonic(), self.overlay.folder / "output"
        arguments = [*self._arguments, *(["-x"] if stops else []), *tests]
        asked = {"arguments": arguments, "limit_s": limit_s or self.limit_s, "output": str(output)}
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        answer = json.loads(self._server.stdout.readline())
        text = output.read_text(errors="replace")
        return TestRun(answer["code"], tuple(dict.fromkeys(_FAILED.findall(text))), time.monotonic() - began, text)


def try_mutation(runner: TestRunner, mutation: Mutation, whole: bool) -> Verdict:
    """Return whether the tests that the mutation names fail with it. `whole`: else, whether any test does."""
    verdict = Verdict(mutation.name, mutation.file, mutation.fault, ERROR)
    try:
        with runner.overlay.mutated(mutation):
            for test in mutation.tests:  # one by one: pytest would sort ids into their files
                verdict = _judge(verdict, runner.run([test]))
                if verdict.status != SURVIVED:
                    return verdict
            return _judge(replace(verdict, whole=True), runner.run(WHOLE, limit_s=7200.0)) if whole else verdict
    except (RuntimeError, ValueError) as error:
        return replace(verdict, why=str(error))


def _judge(verdict: Verdict, run: TestRun) -> Verdict:
    verdict = replace(verdict, seconds=round(verdict.seconds + run.seconds, 1))
    if run.code is None:
        return replace(verdict, why=f"more than {run.seconds:.0f} s (--limit)")  # a test that hangs ends after 300 s
    if run.code in (0, _NO_TESTS):  # all tests of a file may be in another tier
        return replace(verdict, status=SURVIVED)
    if run.code == 1:
        return replace(verdict, status=CAUGHT, by=run.failed[0] if run.failed else "a test that ended pytest")
    return replace(verdict, why=f"pytest ended with {run.code}: {run.output[-600:]}")


def check_without(runner: TestRunner, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Run the tests that failed without any mutation. Return the verdicts; of one whose test fails here too, an error."""
    tests = sorted({v.by for v in verdicts if v.status == CAUGHT and "::" in v.by})
    if not tests:
        return list(verdicts)
    run = runner.run(tests, stops=False, limit_s=max(runner.limit_s, 60.0 * len(tests)))
    if run.code in (0, 1):
        failed = set(run.failed)
    else:  # one of them has ended pytest
        failed = {test for test in tests if runner.run([test]).code != 0}
    return [
        replace(v, status=ERROR, why=f"{v.by} fails without it, too") if v.status == CAUGHT and v.by in failed else v
        for v in verdicts
    ]
