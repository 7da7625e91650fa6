"""Faults: rank 1 is killed, stopped, skips a call, passes other arguments or is late. Every living rank must raise in time.

No torchrun: a launcher ends all ranks when one dies. Each case has its own processes. Several cases share the GPUs. A living
rank must raise an error of ub_overlap that names rank 1, within twice the deadline after the fault (plus SPARE_S for sharing
the devices). Its outputs are NaN or those of a call that had ended. A further call raises too.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.gpu.conftest import ranks_of_this_machine
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
    """Return whether an error's first line names `rank`."""
    first = text.splitlines()[0] if text else ""
    return any(str(rank) in re.findall(r"\d+", part) for part in re.findall(r"ranks? [\d, and]+", first))


def judge(fault: Fault, outcome: Outcome, deadline: float, cuda: bool) -> str:
    """Return what is wrong with the result of this rank, or ""."""
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


def play(fault: Fault, device: str, ranks: int, deadline: float) -> tuple[str, str]:
    """Run one fault and return (what is wrong, or "", and the measured values)."""
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
        return "; ".join(bad), ""
    values = [outcomes[r].value for r in living]
    if not fault.errors:
        return "", f"no error, {max(v['seconds'] for v in values):.1f} s of {took:.0f} s"
    texts = sorted({f"{v['error']} naming {list(v['ranks'])}" for v in values})
    outs = sorted({v["outputs"] for v in values})
    slowest = max(v["seconds"] for v in values)
    return "", f"{slowest:.1f} s after: {', '.join(texts)}; outputs {', '.join(outs)}"


class FaultRuns:
    """Concurrent runs of all selected faults. Each test reads its own result."""

    def __init__(self, faults: list[Fault], device: str, ranks: int, deadline: float, at_once: int) -> None:
        self._pool = ThreadPoolExecutor(at_once)
        self._runs = {fault.name: self._pool.submit(play, fault, device, ranks, deadline) for fault in faults}

    def result(self, fault: Fault) -> tuple[str, str]:
        return self._runs[fault.name].result()


@pytest.fixture(scope="module")
def gpu_runs(request: pytest.FixtureRequest) -> FaultRuns:
    """Run the selected faults on all GPUs, four at a time, with a deadline of 4 s."""
    chosen = [item.callspec.params["fault"] for item in request.session.items if item.function is test_fault]  # type: ignore[attr-defined]
    return FaultRuns(chosen, "cuda", ranks_of_this_machine(), 4.0, 4)


QUICK = {fault.name for fault in faults("cuda", quick=True)}


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[] if f.name in QUICK else pytest.mark.full) for f in faults("cuda", quick=False)],
    ids=lambda fault: fault.name,
)
def test_fault(ranks: int, gpu_runs: FaultRuns, fault: Fault, record_property: Any) -> None:
    wrong, measured = gpu_runs.result(fault)
    record_property("measured", measured)
    assert not wrong, wrong
    print(measured)


@pytest.mark.timeout(120)
def test_a_killed_rank_on_the_cpu() -> None:
    wrong, _ = play(Fault("dies", "RS", "SIGKILL", ("PeerTimeoutError",)), "cpu", 2, 2.0)
    assert not wrong, wrong
