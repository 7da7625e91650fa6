"""`bisect`: which site breaks a command, by forcing sites to "none" by halves.

    python -m ub_overlap bisect -- torchrun --nproc-per-node 2 train.py          bad: another exit code than 0,
    python -m ub_overlap bisect --loss 'loss (\\S+)' -- torchrun ... train.py     or another last loss than without overlap

Every run is a process of its own with UB_OVERLAP_DISABLE set; torch's compile caches are off, so that plans are made anew.
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
    parser.add_argument("--loss", metavar="REGEX", help="a group around a number of the output; the last one is compared")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="relative difference of the loss (default 0.01)")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="of one run; one that takes longer is bad")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and what to run")
    parser.set_defaults(run=lambda flags: run(flags, parser))


@dataclass(slots=True)
class Trial:
    """Runs a command with some sites alone overlapped, and says whether that was bad."""

    command: Sequence[str]
    loss: re.Pattern[str] | None
    tolerance: float
    timeout_s: float
    sites: list[str] = field(default_factory=list)
    reference: float | None = None
    runs: int = 0

    def bad(self, kept: Sequence[str]) -> bool:
        off = [s for s in self.sites if s not in kept]
        code, loss = self.once(",".join(off))
        wrong = code != 0 or (self.loss is not None and not self._like_reference(loss))
        said = f"exit code {code}" + (f", loss {loss}" if self.loss else "")
        which = f"{len(kept)} of {len(self.sites)}" if self.sites else "all"
        print(f"run {self.runs}: {which} sites overlapped: {said}: {'bad' if wrong else 'good'}", file=sys.stderr)
        return wrong

    def once(self, off: str) -> tuple[int, float | None]:
        """(exit code, the last loss that was printed); a run that takes too long has code 124."""
        self.runs += 1
        env = {**os.environ, "UB_OVERLAP_DISABLE": off, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        run = subprocess.Popen(
            self.command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = run.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # a launcher's ranks too
            run.wait()
            return 124, None
        found = self.loss.findall(out) if self.loss else []
        try:
            return run.returncode, float(found[-1])
        except (IndexError, ValueError):
            return run.returncode, None

    def _like_reference(self, loss: float | None) -> bool:
        known = self.reference
        if loss is None or known is None or not math.isfinite(loss):
            return False
        return abs(loss - known) <= self.tolerance * max(abs(known), 1e-12)


def halve(sites: Sequence[str], bad: Callable[[Sequence[str]], bool]) -> list[str]:
    """The least sites that are found bad by halves: one, or several that are bad only together. `sites` together are bad."""
    found = list(sites)
    while len(found) > 1:
        middle = len(found) // 2
        half = next((part for part in (found[:middle], found[middle:]) if bad(part)), None)
        if half is None:
            break
        found = half
    return found


def run(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0 and the site, or 1 where there is nothing to find: the run is good with all, or bad with none."""
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
    code, trial.reference = trial.once("*")
    if code != 0 or (loss is not None and (trial.reference is None or not math.isfinite(trial.reference))):
        print(f"the command is bad without any overlap (exit code {code}, loss {trial.reference})", file=sys.stderr)
        return 1
    before = time.time()
    if not trial.bad([]):  # nothing disabled: `sites` is empty so far
        print("the command is good with all sites: nothing to find", file=sys.stderr)
        return 1
    about = overlapped_since(before)
    trial.sites = list(about)
    if not about:
        print("no plan with an overlapped site was stored by the command", file=sys.stderr)
        return 1
    found = halve(trial.sites, trial.bad)
    rows = [{"site": s, **about[s]} for s in found]
    if flags.json:
        print(json.dumps({"sites": rows, "runs": trial.runs}))
    else:
        print("bad" if len(found) == 1 else f"bad only together: {len(found)} sites")
        for row in rows:
            print(f"  {row['site']} {row['kind']} {row['strategy']} {row['module']} {row['source']}")
        print("leave them alone: options={'overrides': " + json.dumps(dict.fromkeys(found, "none")) + "}")
    return 0


def overlapped_since(moment: float) -> dict[str, dict[str, str]]:
    """The overlapped sites of plans that were stored since then, by id: kind, strategy, module, source."""
    from ub_overlap.runtime import plan_store

    found: dict[str, dict[str, str]] = {}
    folder = plan_store.directory()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        if path.stat().st_mtime < moment - 1:  # some file systems count whole seconds
            continue
        for site in json.loads(path.read_text())["sites"]:
            if "pipelined" in site["strategy"] or "bulk" in site["strategy"]:
                found.setdefault(site["id"], {k: site[k] for k in ("kind", "strategy", "module", "source")})
    return dict(sorted(found.items(), key=lambda item: (item[0].split(".")[0] != "forward", int(item[0].split(".")[1]))))
