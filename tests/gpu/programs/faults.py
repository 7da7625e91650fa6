"""Faults: rank 1 is killed, stopped, skips, differs or is late; what every living rank raises, and when.

    python tests/gpu/programs/faults.py --ranks 4 [--deadline 4] [--at-once 4] [--quick] [--only TEXT] [--device cpu]

No torchrun: a launcher ends all ranks when one dies. Each case has processes of its own; several cases share the GPUs at
a time. A living rank must raise an error of ub_overlap that names rank 1 within twice the deadline of the fault (and SPARE_S
for sharing the devices), its outputs are NaN or those of a call that had ended, and a further call raises too.
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

from tests.gpu.frame import options, text_table  # isort: skip

from tests.runtime.spawn import Outcome, run_ranks

GUILTY, SPARE_S = 1, 1.5
KINDS = ("AG", "RS", "AR", "bulk")


@dataclass(frozen=True)
class Fault:
    function: str
    kind: str
    how: str
    errors: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.function} {self.how}"


def faults(device: str, quick: bool) -> list[Fault]:
    gone, timeout, found = ("PeerTimeoutError",), ("PeerTimeoutError",), []
    for kind in ("AG", "RS") if quick else KINDS:
        found += [Fault("dies", kind, how, gone) for how in ("SIGKILL", "SIGSTOP")]
    for kind in ("AG",) if quick else KINDS:
        found += [Fault("skips", kind, "last", timeout), Fault("skips", kind, "next", ("SiteMismatchError",))]
    for kind in ("RS",) if quick else ("AG", "RS", "AR"):
        found += [
            Fault("differs", kind, "shape", ("ShapeMismatchError",)),
            Fault("differs", kind, "site", ("SiteMismatchError",)),
        ]
    found += [Fault("slow", "AG", "host", ()), Fault("slow", "RS", "device", ())]
    if device == "cuda":
        found += [Fault("dies", "graph", how, gone) for how in ("SIGKILL", "SIGSTOP")]
        found += [Fault("skips", "graph", "last", timeout), Fault("slow", "graph", "device", ())]
    return found


def names(text: str, rank: int) -> bool:
    """Whether an error's first line names `rank`."""
    first = text.splitlines()[0] if text else ""
    return any(str(rank) in re.findall(r"\d+", part) for part in re.findall(r"ranks? [\d, and]+", first))


def judge(fault: Fault, outcome: Outcome, deadline: float, cuda: bool) -> str:
    """What is wrong with how this rank ended; "" where nothing is."""
    if outcome.error or outcome.value is None:
        last = outcome.text.strip().splitlines()
        return f"ended with {outcome.error or 'nothing'} {last[0] if last else ''}"
    seen: dict[str, Any] = outcome.value
    if not fault.errors:
        return "" if not seen["error"] else f"{seen['error']}: {seen['text'].splitlines()[0] if seen['text'] else ''}"
    if seen["error"] not in fault.errors:
        return f"raised {seen['error'] or 'nothing'} after {seen['calls']} calls: {seen['text'][:120]}"
    if not names(seen["text"], GUILTY):
        return f"does not name rank {GUILTY}: {seen['text'].splitlines()[0]}"
    if seen["seconds"] > 2 * deadline + SPARE_S:
        return f"raised after {seen['seconds']:.1f} s"
    if "WRONG" in seen["outputs"] or (
        cuda and fault.function != "dies" and outcome.rank != GUILTY and seen["outputs"] not in ("nan", "none")
    ):
        return f"outputs are {seen['outputs']}"
    if not seen["after"]:
        return "a further call did not raise"
    return seen["notes"]


def play(fault: Fault, device: str, ranks: int, deadline: float) -> tuple[str, str, str]:
    """One row."""
    living = [rank for rank in range(ranks) if rank != GUILTY or fault.function != "dies"]
    clock = time.monotonic()
    outcomes = run_ranks(
        f"tests.gpu.rank_faults:{fault.function}",
        ranks,
        args=(device, fault.kind, fault.how, deadline),
        timeout=90 + 4 * deadline,
        wait_for=living,
    )
    bad = [f"rank {r}: {why}" for r in living if (why := judge(fault, outcomes[r], deadline, device == "cuda"))]
    took = time.monotonic() - clock
    if bad:
        return fault.name, "FAIL", "; ".join(bad)[:400]
    values = [outcomes[r].value for r in living]
    if not fault.errors:
        return fault.name, "ok", f"no error, {max(v['seconds'] for v in values):.1f} s of {took:.0f} s"
    texts = sorted({f"{v['error']} naming {list(v['ranks'])}" for v in values})
    outs = sorted({v["outputs"] for v in values})
    slowest = max(v["seconds"] for v in values)
    return fault.name, "ok", f"{slowest:.1f} s after: {', '.join(texts)}; outputs {', '.join(outs)}"


def main() -> int:
    parser = options(argparse.ArgumentParser(description="faults"))
    parser.add_argument("--ranks", type=int, default=0, help="default: all GPUs; 3 on the CPU")
    parser.add_argument("--deadline", type=float, default=4.0, help="seconds that a wait for a peer may take")
    parser.add_argument("--at-once", type=int, default=0, help="cases that share the devices at a time (default 4; CPU: 1)")
    chosen = parser.parse_args()
    ranks = chosen.ranks
    if not ranks:
        import torch

        ranks = torch.cuda.device_count() if chosen.device == "cuda" else 3
    work = [f for f in faults(chosen.device, chosen.quick) if chosen.only in f.name]
    at_once = chosen.at_once or (4 if chosen.device == "cuda" else 1)
    began, lock, rows = time.monotonic(), threading.Lock(), dict[str, tuple[str, str, str]]()

    def one(fault: Fault) -> None:
        try:
            row = play(fault, chosen.device, ranks, chosen.deadline)
        except Exception as error:  # noqa: BLE001  a row of its own
            row = (fault.name, "FAIL", repr(error)[:300])
        with lock:
            rows[fault.name] = row
            print(f"[{time.monotonic() - began:5.1f} s] {row}", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, work))
    table = [rows[f.name] for f in work]
    print(
        text_table(f"faults, {ranks} ranks, deadline {chosen.deadline:g} s, {time.monotonic() - began:.0f} s", table),
        flush=True,
    )
    return int(any(row[1] == "FAIL" for row in table))


if __name__ == "__main__":
    sys.exit(main())
