"""`bisect`: find the site that breaks a command, by disabling halves of the sites.

    python -m ub_overlap bisect -- torchrun --nproc-per-node 2 train.py          bad: exit code is not 0,
    python -m ub_overlap bisect --loss 'loss (\\S+)' -- torchrun ... train.py     or the last loss differs

The loss is compared with the run without overlap. Every run is a separate process with UB_OVERLAP_DISABLE set. torch's compile
caches are off, so every run compiles its plans.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser("bisect", parents=[as_json], help="find the site that breaks a command: -- COMMAND ...")
    parser.add_argument("--loss", metavar="REGEX", help="pattern with one group around the loss; the last match counts")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="relative difference of the loss (default 0.01)")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="time limit of one run; a longer run is bad")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    parser.set_defaults(run=lambda flags: run(flags, parser))


@dataclass(slots=True)
class Trial:
    """Runs of a command with a subset of sites overlapped, each classified as good or bad."""

    command: Sequence[str]
    loss: re.Pattern[str] | None
    tolerance: float
    timeout_s: float
    sites: list[str] = field(default_factory=list)
    reference: float | None = None
    runs: int = 0

    def is_bad(self, enabled: Sequence[str]) -> bool:
        """Run the command with only the sites `enabled` overlapped. Return whether it is bad."""
        disabled = [s for s in self.sites if s not in enabled]
        code, loss = self.run_command(",".join(disabled))
        wrong = code != 0 or (self.loss is not None and not self._matches_reference(loss))
        outcome = f"exit code {code}" + (f", loss {loss}" if self.loss else "")
        which = f"{len(enabled)} of {len(self.sites)}" if self.sites else "all"
        print(f"run {self.runs}: {which} sites overlapped: {outcome}: {'bad' if wrong else 'good'}", file=sys.stderr)
        return wrong

    def run_command(self, disabled: str) -> tuple[int, float | None]:
        """Return (exit code, last loss printed). A run that exceeds the time limit has code 124."""
        self.runs += 1
        env = {**os.environ, "UB_OVERLAP_DISABLE": disabled, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        run = subprocess.Popen(
            self.command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = run.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # also kills a launcher's ranks
            run.wait()
            return 124, None
        losses = self.loss.findall(out) if self.loss else []
        try:
            return run.returncode, float(losses[-1])
        except (IndexError, ValueError):
            return run.returncode, None

    def _matches_reference(self, loss: float | None) -> bool:
        expected = self.reference
        if loss is None or expected is None or not math.isfinite(loss):
            return False
        return abs(loss - expected) <= self.tolerance * max(abs(expected), 1e-12)


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


def run(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the bad site and return 0. Return 1 if the run is good with all sites, or bad with none."""
    command = flags.command[1:] if flags.command[:1] == ["--"] else flags.command
    if not command:
        parser.error("give the command after --")
    try:
        loss = re.compile(flags.loss) if flags.loss else None
    except re.error as error:
        parser.error(f"--loss {flags.loss!r}: {error}")
    if loss is not None and loss.groups != 1:
        parser.error(f"--loss {flags.loss!r}: expected one group, around the number")
    trial = Trial(command, loss, flags.tolerance, flags.timeout)
    code, trial.reference = trial.run_command("*")
    if code != 0 or (loss is not None and (trial.reference is None or not math.isfinite(trial.reference))):
        print(f"the command is bad without any overlap (exit code {code}, loss {trial.reference})", file=sys.stderr)
        return 1
    before = time.time()
    if not trial.is_bad([]):  # nothing disabled: `sites` is empty so far
        print("the command is good with all sites: nothing to find", file=sys.stderr)
        return 1
    about = overlapped_since(before)
    trial.sites = list(about)
    if not about:
        print("no plan with an overlapped site was stored by the command", file=sys.stderr)
        return 1
    bad_sites = find_bad_sites(trial.sites, trial.is_bad)
    rows = [{"site": s, **about[s]} for s in bad_sites]
    if flags.json:
        print(json.dumps({"sites": rows, "runs": trial.runs}))
    else:
        print("bad" if len(bad_sites) == 1 else f"bad only together: {len(bad_sites)} sites")
        for row in rows:
            print(f"  {row['site']} {row['kind']} {row['strategy']} {row['module']} {row['source']}")
        print("leave them alone: options={'overrides': " + json.dumps(dict.fromkeys(bad_sites, "none")) + "}")
    return 0


def overlapped_since(moment: float) -> dict[str, dict[str, str]]:
    """Return the overlapped sites of plans stored since `moment`, by id: kind, strategy, module, source."""
    from ub_overlap.runtime import plan_store

    sites: dict[str, dict[str, str]] = {}
    folder = plan_store.directory()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        if path.stat().st_mtime < moment - 1:  # some file systems store whole seconds
            continue
        for site in json.loads(path.read_text())["sites"]:
            if "pipelined" in site["strategy"] or "bulk" in site["strategy"]:
                sites.setdefault(site["id"], {k: site[k] for k in ("kind", "strategy", "module", "source")})
    return dict(sorted(sites.items(), key=lambda item: (item[0].split(".")[0] != "forward", int(item[0].split(".")[1]))))
