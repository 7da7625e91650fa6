"""The fault matrix: faults of one rank, by kind of op, place and signal, and what the other ranks must then observe.

No torchrun: a launcher ends all ranks when one dies. Each trial has its own processes. A living rank must raise an error of
ub_overlap that names the victim, within twice the deadline after the fault (plus `spare_s` for a busy machine). Its outputs
are NaN or those of a call that had ended. A further call raises too. No shared memory is left open.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.harness.outcomes import Outcome, observe_ranks
from tests.harness.strike import MESSAGES

from .steps import MICROBATCHES, RANKS, STEPS

OPS = ("AG", "RS", "AR", "bulk")
ALL_OPS = (*OPS, "SAG", "SRS")
DIRECT = ("RS direct", "AR direct")
FUSED = ("one_shot", "two_shot")
SPLIT = ("split AG", "split RS", "split AR", "coalesced", "A2A", "A2A rounds", "A2A step", "A2A order")
"""Collectives of two ops, as data-parallel, context-parallel and expert-parallel programs run them."""
QUICK_SPLIT = (("between", "split RS"), ("between", "A2A rounds"), ("dies", "coalesced"))
"""(function, kind) of the split faults that a quick run tries."""
ABORTED = ("GroupAbortedError", "PeerFailedError")
TIMEOUT, FAILED, MISMATCH, SHAPE = ("PeerTimeoutError",), ("PeerFailedError",), ("SiteMismatchError",), ("ShapeMismatchError",)
GRACE_S = 10.0
"""Seconds until a plain collective whose peer is lost ends (runtime/ops/plain_collective.py)."""
PATIENCE = 10.0
"""Trials with a dead process have a deadline so many times longer, and the same limit: ranks see a dead process at once."""


@dataclass(frozen=True)
class Fault:
    """A fault of the victim: a function of rank_faults.py, an op, and a variant.

    `errors`: classes that living ranks may raise, () for none. `victim_lives`: the victim raises too. `is_death`: its process
    ends. `devices`: where it is tried. `ranks`: those that it needs, 0 for any. `recovers`: a further call works.
    """

    function: str
    kind: str
    how: str
    errors: tuple[str, ...]
    victim_lives: bool = True
    is_death: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    ranks: int = 0
    recovers: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.function} {self.how}"


def list_split_faults() -> list[Fault]:
    """Return the faults of split collectives, messages, and gathers that the copy engine copies."""
    faults: list[Fault] = []
    for kind in (*SPLIT, "message", "AG engine"):
        devices = ("cpu",) if kind == "A2A rounds" else ("cpu", "cuda")  # GPUs are past the rounds when the signal comes
        faults.append(Fault("dies", kind, "SIGKILL", TIMEOUT, False, True, devices))
        faults.append(Fault("dies", kind, "SIGSTOP", TIMEOUT, False, devices=devices))
    faults += [Fault("between", kind, "SIGKILL", TIMEOUT, False, True) for kind in SPLIT]
    faults += [Fault("between", kind, "SIGSTOP", TIMEOUT, False) for kind in ("split RS", "split AR", "A2A rounds", "A2A step")]
    faults += [Fault("between", kind, "sleeps", TIMEOUT, False) for kind in ("split AR", "A2A rounds")]
    left = TIMEOUT + FAILED + MISMATCH
    faults += [Fault("between", kind, "abandons", left) for kind in ("split AG", "split RS", "coalesced", "A2A")]
    faults += [
        Fault("skips", kind, "last", TIMEOUT) for kind in ("split RS", "coalesced", "A2A rounds", "message", "AG engine")
    ]
    faults += [Fault("skips", kind, "next", MISMATCH) for kind in ("split AR", "coalesced", "A2A", "A2A step")]
    faults += [Fault("aborts", kind, "busy", ABORTED) for kind in ("split AR", "A2A rounds", "message")]
    return faults


def list_program_faults() -> list[Fault]:
    """Return the faults of whole training steps."""
    faults: list[Fault] = []
    for kind in STEPS:
        ranks = RANKS.get(kind, 0)
        errors = TIMEOUT + FAILED if ranks else TIMEOUT  # a rank of the other host may hear of it from one that has waited
        faults += [
            Fault("dies", kind, "SIGKILL", errors, False, True, ("cpu",), ranks),
            Fault("dies", kind, "SIGSTOP", errors, False, False, ("cpu",), ranks),
            Fault("leaves", kind, "raises", errors, False, True, ("cpu",), ranks),
        ]
    for message in (f"{what} {microbatch}" for microbatch in range(MICROBATCHES) for what in MESSAGES):
        for name in ("SIGKILL", "SIGSTOP"):
            is_death, how, ranks = name == "SIGKILL", f"{message}:{name}", RANKS["pipeline step"]
            faults.append(Fault("at_message", "pipeline step", how, TIMEOUT + FAILED, False, is_death, ("cpu",), ranks))
    return [*faults, Fault("skips", "compiled step", "last", TIMEOUT, devices=("cpu",))]


def list_recoveries() -> list[Fault]:
    """Return the deaths after which the other ranks go on in a group of their own."""
    kinds = ("RS", "A2A", "message", *(kind for kind in STEPS if kind != "two hosts"))
    faults = [("SIGKILL", kind) for kind in kinds] + [("SIGSTOP", kind) for kind in ("RS", "compiled step")]
    return [
        Fault("shrinks", kind, how, TIMEOUT + FAILED, False, how == "SIGKILL", ("cpu",), 3, recovers=True)
        for how, kind in faults
    ]


def list_faults(device: str, quick: bool = False) -> list[Fault]:
    """Return the faults for a device. `quick`: fewer ops."""
    faults: list[Fault] = []
    for kind in ("AG", "RS") if quick else (*(OPS if device == "cuda" else ALL_OPS), *DIRECT, *FUSED):
        faults += [
            Fault("dies", kind, "SIGKILL", TIMEOUT, victim_lives=False, is_death=True),
            Fault("dies", kind, "SIGSTOP", TIMEOUT, victim_lives=False),
            Fault("dies", kind, "SIGTERM", TIMEOUT, victim_lives=False, is_death=True, devices=("cpu",)),
            Fault("dies", kind, "SIGINT", TIMEOUT + FAILED, victim_lives=False, is_death=True, devices=("cpu",)),
        ]
    for function in ("dies", "orphans"):
        faults += [Fault(function, f"plain {kind}", "SIGKILL", TIMEOUT, False, True, ("cpu",)) for kind in OPS]
    for kind in ("AG",) if quick else (*OPS, *DIRECT, *FUSED):
        faults += [Fault("skips", kind, "last", TIMEOUT), Fault("skips", kind, "next", MISMATCH)]
        faults += [Fault("aborts", kind, how, ABORTED) for how in ("busy", "idle")]
        faults += [Fault("leaves", kind, how, TIMEOUT, False, True, ("cpu",)) for how in ("raises", "exits")]
        faults += [Fault("leaves", kind, "in_op", FAILED, False, True, ("cpu",))]
    for kind in ("RS",) if quick else ("AG", "RS", "AR"):
        faults += [Fault("differs", kind, "shape", SHAPE), Fault("differs", kind, "site", MISMATCH)]
        faults += [Fault("differs", kind, "dtype", SHAPE, devices=("cpu",))]
        faults += [Fault("differs", kind, "plan", ("PlanMismatchError",), devices=("cpu",))]
    before = TIMEOUT + FAILED
    for how in ("exits", "sleeps", "SIGKILL", "SIGSTOP"):
        faults.append(Fault("binds", "AG", how, before, victim_lives=False, devices=("cpu",)))
    faults.append(Fault("binds", "AG", "compiled", TIMEOUT, False, True, ("cpu",)))
    for topic in ("hosts", "arena", "attached"):
        for how in ("SIGKILL", "SIGTERM", "SIGSTOP"):
            faults.append(Fault("binds", "AG", f"{topic}:{how}", before, victim_lives=False, devices=("cpu",)))
    for topic in ("grow/1", "grown/1"):
        for how in ("SIGKILL", "SIGTERM"):
            faults.append(Fault("grows", "RS", f"{topic}:{how}", TIMEOUT, False, True, ("cpu",)))
        faults.append(Fault("grows", "RS", f"{topic}:SIGSTOP", TIMEOUT, victim_lives=False, devices=("cpu",)))
    faults += list_recoveries()
    starved = ("ArenaError", *FAILED)  # the victim's own, and what the others hear of it
    faults += [Fault("starves", "RS", "first:files", starved, devices=("cpu",), recovers=True)]
    faults += [Fault("starves", "RS", how, starved, devices=("cpu",)) for how in ("later:files", "later:memory")]
    # Peers that cannot be looked up are not gone.
    faults += [Fault("starves", "RS", f"late:{what}", (), devices=("cpu",)) for what in ("files", "threads")]
    alone = ("UbOverlapError", *TIMEOUT, *FAILED)  # a victim without threads cannot tell all of its peers
    faults += [Fault("starves", "RS", "first:threads", alone, devices=("cpu",), recovers=True)]
    faults += [Fault("starves", "RS", "later:threads", alone, devices=("cpu",))]
    faults += [Fault("withholds", "bulk", how, TIMEOUT, victim_lives=False) for how in ("sleeps", "SIGSTOP")]
    faults += [Fault("slow", kind, "host", ()) for kind in ("AG", "RS direct", "two_shot")]
    faults += [Fault("slow", kind, "device", (), devices=("cuda",)) for kind in ("RS", "RS direct", *FUSED)]
    faults += [Fault("forks", "AG", how, (), devices=("cpu",)) for how in ("bound", "unbound")]
    split = list_split_faults()
    faults += [fault for fault in split if not quick or (fault.function, fault.kind) in QUICK_SPLIT]
    faults += [fault for fault in list_program_faults() if not quick or fault.how == "SIGKILL"]
    if device == "cuda":
        for how in ("SIGKILL", "SIGSTOP"):
            faults.append(Fault("dies", "graph", how, TIMEOUT, victim_lives=False, is_death=how == "SIGKILL"))
        faults += [Fault("aborts", "graph", "busy", ABORTED)]
        faults += [Fault("skips", "graph", "last", TIMEOUT), Fault("slow", "graph", "device", ())]
    return [fault for fault in faults if device in fault.devices]


def names_rank(text: str, rank: int) -> bool:
    """Return whether an error's first line names `rank`."""
    first = text.splitlines()[0] if text else ""
    return any(str(rank) in re.findall(r"\d+", part) for part in re.findall(r"ranks? [\d, and]+", first))


def judge(fault: Fault, outcome: Outcome, limit_s: float, victim: int, cuda: bool) -> str:
    """Return what is wrong with the result of a rank, or ""."""
    if outcome.error or outcome.value is None:
        last = outcome.text.strip().splitlines()
        return f"ended with {outcome.error or 'nothing'} {last[0] if last else ''}"
    seen: dict[str, Any] = outcome.value
    if not fault.errors:
        return "" if not seen["error"] else f"{seen['error']}: {seen['text'].splitlines()[0] if seen['text'] else ''}"
    if seen["error"] not in fault.errors:
        return f"raised {seen['error'] or 'nothing'} after {seen['calls']} calls: {seen['text'][:120]}"
    if outcome.rank != victim and not names_rank(seen["text"], victim):
        return f"does not name rank {victim}: {seen['text'].splitlines()[0]}"
    if seen["seconds"] > limit_s:
        return f"raised after {seen['seconds']:.1f} s"
    may_be_right = fault.function in ("dies", "between") or fault.kind == "message" or outcome.rank == victim or not cuda
    if "WRONG" in seen["outputs"] or not (may_be_right or seen["outputs"] in ("nan", "none")):
        return f"outputs are {seen['outputs']}"
    if bool(seen["after"]) == fault.recovers:
        return f"a further call raised {seen['after'] or 'nothing'}"
    return str(seen["notes"])


def find_limit(fault: Fault, deadline: float, spare_s: float) -> float:
    """Return the seconds after the fault within which living ranks raise."""
    least_s = GRACE_S if fault.function == "orphans" else 0.0
    return max(2 * deadline, least_s) + spare_s


def play(fault: Fault, device: str, ranks: int, deadline: float, victim: int = 1, spare_s: float = 1.5) -> tuple[str, str]:
    """Run one trial and return (what is wrong, or "", and the measured values). A fault that needs other ranks has those."""
    ranks = fault.ranks or ranks
    living = [rank for rank in range(ranks) if rank != victim or fault.victim_lives]
    patience = PATIENCE if fault.is_death else 1.0
    clock = time.monotonic()
    outcomes = observe_ranks(
        f"tests.soak.rank_faults:{fault.function}",
        ranks,
        args=(device, fault.kind, fault.how, patience * deadline, victim),
        timeout=90 + 4 * patience * deadline,
        wait_for=living,
    )
    limit_s = find_limit(fault, deadline, spare_s)
    bad = [f"rank {r}: {why}" for r in living if (why := judge(fault, outcomes[r], limit_s, victim, device == "cuda"))]
    took = time.monotonic() - clock
    if bad:
        return "; ".join(bad), ""
    values = [outcomes[r].value for r in living]
    if not fault.errors:
        return "", f"no error, {max(v['seconds'] for v in values):.1f} s of {took:.0f} s"
    texts = sorted({f"{v['error']} naming {list(v['ranks'])}" for v in values})
    outs = sorted({v["outputs"] for v in values})
    slowest = max(v["seconds"] for v in values)
    return "", f"{slowest:.1f} s after: {', '.join(texts)}; outputs {', '.join(outs)}"


class FaultRuns:
    """Concurrent runs of faults. Each test reads its own result."""

    def __init__(
        self, faults: Sequence[Fault], device: str, ranks: int, deadline: float, at_once: int, spare_s: float = 1.5
    ) -> None:
        self._pool = ThreadPoolExecutor(at_once)
        self._runs = {fault.name: self._pool.submit(play, fault, device, ranks, deadline, spare_s=spare_s) for fault in faults}

    def result(self, fault: Fault) -> tuple[str, str]:
        return self._runs[fault.name].result()

    def close(self) -> None:
        """Wait for all runs."""
        self._pool.shutdown()
