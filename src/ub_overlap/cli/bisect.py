"""`bisect`: find the site that breaks a command, by disabling halves of the sites.

    python -m ub_overlap bisect -- torchrun --nproc-per-node 2 train.py          bad: exit code is not 0,
    python -m ub_overlap bisect --loss 'loss (\\S+)' -- torchrun ... train.py     or the last loss differs

Run 1 is without overlap: the loss of the others is compared with it. Run 2 overlaps all sites, later runs a part of them. Every
run is a separate process (trial.py). A run over the time limit is a timeout: bad by default, because overlap that goes wrong
often hangs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .parsers import Parser, add_verb, non_negative_int, positive
from .progress import show_progress
from .stored import report_skipped
from .trial import Outcome, Runner, Trial, interrupted_by_sigterm

ANSWERS = {
    "found": "one site is bad",
    "found_together": "several sites are bad only in combination",
    "good": "the command is good with all sites overlapped: nothing to find",
    "bad_without_overlap": "the command is bad without any overlap",
    "no_sites": "no plan with an overlapped site was stored by the command",
    "timeout": "a run timed out, so the search stopped (--on-timeout stop)",
}


class Stopped(Exception):
    """A run timed out, and timeouts end the search."""


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "bisect", "find the site that breaks a command, by disabling halves of the sites", parents=[as_json],
        usage="%(prog)s [flags] -- COMMAND ...",
        details="A run is bad if its exit code is not 0, if it times out, or if its last loss differs from that of the run "
        "without overlap. Compile caches are off, so every run compiles its plans.",
        examples=[
            "bisect -- torchrun --nproc-per-node 2 train.py",
            "bisect --loss 'loss (\\S+)' --timeout 300 -- torchrun --nproc-per-node 2 train.py",
        ],
        exits={0: "found the bad site, or the sites that are bad in combination", 1: "found none; `status` says why"},
    )  # fmt: skip
    parser.add_argument("--loss", metavar="REGEX", help="pattern with one group around the loss; the last match counts")
    parser.add_argument(
        "--tolerance", type=positive, default=1e-2, metavar="X", help="relative difference of the loss (default 0.01)"
    )
    parser.add_argument("--timeout", type=positive, default=1800, metavar="S", help="time limit of one run (default 1800)")
    parser.add_argument(
        "--on-timeout", choices=("bad", "stop"), default="bad", help="what a timeout is: a bad run (default), or the end"
    )
    parser.add_argument("--show-output", action="store_true", help="show the output of the command while it runs, on stderr")
    parser.add_argument("--tail", type=non_negative_int, default=10, metavar="N", help="lines to show of a failed run (10)")
    parser.add_argument("--logs", metavar="FOLDER", help="folder of the runs' output (default: a new temporary one)")
    parser.add_argument("--quiet", action="store_true", help="print the answer only")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command, after --")
    parser.set_defaults(run=lambda flags: run(flags, parser))


def find_bad_sites(sites: Sequence[str], is_bad: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return one bad site, or several that are bad only in combination. Precondition: all `sites` combined are bad."""
    suspects = list(sites)
    while len(suspects) > 1:
        middle = len(suspects) // 2
        half = next((part for part in (suspects[:middle], suspects[middle:]) if is_bad(part)), None)
        if half is None:
            break
        suspects = half
    return suspects


def run(flags: argparse.Namespace, parser: Parser) -> int:
    """Print the bad sites and return 0, or the reason why none was found and return 1."""
    runner = _runner(flags, parser)
    search = Search(runner, flags)
    try:
        with interrupted_by_sigterm():
            status, bad_sites = search.run()
    except Stopped:
        status, bad_sites = "timeout", []
    rows = [{"site": s, **search.sites[s]} for s in bad_sites]
    if flags.json:
        answer = {"status": status, "message": ANSWERS[status], "sites": rows, "logs": str(runner.folder)}
        print(json.dumps({**answer, "runs": [trial.to_dict() for trial in runner.trials]}))
    elif rows:
        print("bad" if len(rows) == 1 else f"bad only together: {len(rows)} sites")
        for row in rows:
            print(f"  {row['site']} {row['kind']} {row['strategy']} {row['module']} {row['source']}")
        print("leave them alone: options={'overrides': " + json.dumps(dict.fromkeys(bad_sites, "none")) + "}")
    else:
        last = runner.trials[-1]
        print(f"{ANSWERS[status]} (run {last.number}: {last.ending(search.loss)}; output in {last.log})", file=sys.stderr)
    return 0 if rows else 1


def _runner(flags: argparse.Namespace, parser: Parser) -> Runner:
    """Return what runs the command. Every argument is checked before the first run."""
    command = flags.command[1:] if flags.command[:1] == ["--"] else flags.command
    if not command:
        parser.error("give the command after --")
    if shutil.which(command[0]) is None:
        parser.error(f"the command {command[0]!r} is not found, or is not executable")
    try:
        loss = re.compile(flags.loss) if flags.loss else None
    except re.error as error:
        parser.error(f"--loss {flags.loss!r}: {error}")
    if loss is not None and loss.groups != 1:
        parser.error(f"--loss {flags.loss!r}: expected one group, around the number")
    folder = Path(flags.logs) if flags.logs else Path(tempfile.mkdtemp(prefix="ub_overlap_bisect_"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--logs {flags.logs!r}: {error.strerror}")
    return Runner(command, folder, flags.timeout, loss, flags.show_output)


class Search:
    """The runs of a command with subsets of sites overlapped, each classified as good or bad."""

    def __init__(self, runner: Runner, flags: argparse.Namespace) -> None:
        self.runner, self.tolerance, self.loss = runner, flags.tolerance, runner.loss is not None
        self.stops, self.quiet, self.tail = flags.on_timeout == "stop", flags.quiet, 0 if flags.show_output else flags.tail
        self.sites: dict[str, dict[str, str]] = {}
        self.reference: float | None = None

    def run(self) -> tuple[str, list[str]]:
        """Return the answer, a key of ANSWERS, and the bad sites."""
        self._say(f"output of the runs: {self.runner.folder}")
        first = self._run("no sites overlapped", "*")
        self.reference = first.loss
        if first.outcome is Outcome.BAD or (first.outcome is Outcome.TIMEOUT and not self.stops):
            return "bad_without_overlap", []
        before = time.time()
        if not self._is_bad(self._run("all sites overlapped", "")):
            return "good", []
        self.sites = overlapped_since(before)
        if not self.sites:
            return "no_sites", []
        bad = find_bad_sites(list(self.sites), self._is_bad_with)
        return "found" if len(bad) == 1 else "found_together", bad

    def _is_bad_with(self, enabled: Sequence[str]) -> bool:
        """Run the command with only the sites `enabled` overlapped. Return whether it is bad."""
        disabled = [s for s in self.sites if s not in enabled]
        return self._is_bad(self._run(f"{len(enabled)} of {len(self.sites)} sites overlapped", ",".join(disabled)))

    def _run(self, what: str, disabled: str) -> Trial:
        """Run the command once, print its outcome, and stop the search at a timeout if that was requested."""
        title, quiet = f"bisect: run {len(self.runner.trials) + 1}", self.quiet or self.runner.show_output
        with show_progress(title, quiet=quiet) as progress:
            progress(what)
            trial = self.runner.run(what, disabled)
        trial.outcome = self._judge(trial)
        self._say(f"run {trial.number}: {what}: {trial.ending(self.loss)}: {trial.outcome.value}")
        if trial.outcome is not Outcome.GOOD and not self.quiet and (lines := trial.last_lines(self.tail)):
            print("\n".join(f"    {line}" for line in lines), file=sys.stderr)
        if trial.outcome is Outcome.TIMEOUT and self.stops:
            raise Stopped
        return trial

    def _judge(self, trial: Trial) -> Outcome:
        if trial.timed_out:
            return Outcome.TIMEOUT
        return Outcome.BAD if trial.exit_code != 0 or (self.loss and not self._is_loss_right(trial)) else Outcome.GOOD

    def _is_loss_right(self, trial: Trial) -> bool:
        if trial.loss is None or not math.isfinite(trial.loss):
            return False
        if trial.number == 1:
            return True
        expected = self.reference if self.reference is not None else math.nan
        return abs(trial.loss - expected) <= self.tolerance * max(abs(expected), 1e-12)

    def _is_bad(self, trial: Trial) -> bool:
        return trial.outcome is not Outcome.GOOD

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def overlapped_since(moment: float) -> dict[str, dict[str, str]]:
    """Return the overlapped sites of plans stored since `moment`, by id: kind, strategy, module, source."""
    from ub_overlap.compiler.plan import plan_files
    from ub_overlap.compiler.plan.outcome import outcome_of
    from ub_overlap.compiler.plan.phase import PHASES

    sites: dict[str, dict[str, str]] = {}
    for _, changed, plan in plan_files.stored_plans(report_skipped):
        if changed < moment - 1:  # some file systems store whole seconds
            break
        for site in plan["sites"]:
            if outcome_of(site["strategy"], site["reason"]).is_overlapped:
                sites.setdefault(
                    site["id"],
                    {"kind": site["kind"], "strategy": site["strategy"], "module": site["module"], "source": site["source"]},
                )

    def place(site: str) -> tuple[int, int]:
        phase, number = site.split(".")[:2]
        return PHASES.index(phase), int(number)

    return {site: sites[site] for site in sorted(sites, key=place)}
