"""Races: loops of ops under random delays equal the same calls without delays bitwise; eager, on two streams, and replayed.

Random host and device sleeps of 0 to 5 ms separate the calls on each rank. Inputs are copied into one set of
tensors a site just before a call and overwritten with NaN just behind it, so an op that reads late, or that a peer overtakes,
computes with other numbers. Outputs are compared on the device; the host looks at the verdict now and then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import cases
from tests.gpu.cases import Case, Maker, Truth
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime.session import session

VERSIONS = 6  # different inputs of a site
LOOPS = {
    "AG only": ["AG", "AG2", "AG engine"],
    "RS only": ["RS", "RS1", "RS striped", "RS direct"],
    "direct": ["RS direct", "RS direct 3", "AR direct"],
    "AR only": ["AR"],
    "bulk only": ["bulk", "bulk RS"],
    "float8": ["SAG", "SRS", "SAG2", "SRS wire", "SRS striped"],
    "mixed": ["AG", "RS", "AR", "bulk", "RS striped", "RS direct", "AR direct"],
}


def tensors_of(case: Case) -> list[torch.Tensor]:
    """Return the floating-point tensors of a case's arguments, in order."""
    found: list[torch.Tensor] = []
    for value in case[1]:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found


def with_tensors(case: Case, tensors: list[torch.Tensor]) -> Case:
    rest = iter(tensors)

    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(rest)
        if isinstance(value, list):
            return [put(v) for v in value]
        return value

    return case[0], tuple(put(value) for value in case[1])


@dataclass
class Site:
    """One site of the loop: input `versions`, their expected results without races, and the tensors that it reads."""

    strategy: str
    name: str
    versions: list[Case]
    expected: list[list[torch.Tensor]]
    static: Case

    def load(self, version: int) -> None:
        for to, source in zip(tensors_of(self.static), tensors_of(self.versions[version]), strict=True):
            to.copy_(source)

    def spoil(self) -> None:
        for tensor in tensors_of(self.static):
            cases.bits(tensor).fill_(-1)  # NaN in every type

    def call(self, group: str) -> list[torch.Tensor]:
        return cases.run_op(self.static, self.strategy, group, self.name)


def sites(lockstep: Lockstep, group: str, kinds: list[str], size: int = 256) -> list[Site]:
    """Make sites with expected results, each computed alone with all ranks synchronised and checked against the c10d op."""
    make, made = Maker(lockstep.device, lockstep.ranks), []
    world = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    for number, kind in enumerate(kinds):
        versions = [make.kind(kind, size) for _ in range(VERSIONS)]
        strategy, expected = versions[0][1], []
        static = with_tensors(versions[0][0], [t.clone() for t in tensors_of(versions[0][0])])
        site = Site(strategy, f"race.{number}.{kind}", [case for case, _ in versions], expected, static)
        for version, (case, _) in enumerate(versions):
            truth = Truth.of(case, world)
            site.load(version)
            lockstep.sync()
            lockstep.barrier()

            def alone(site: Site = site, truth: Truth = truth, kind: str = kind) -> list[torch.Tensor]:
                outs = [t.clone() for t in site.call(group)]
                lockstep.sync()
                session.check(group)
                truth.check(outs, f"{kind} alone")
                return outs

            expected.append(lockstep.agree(alone))
        made.append(site)
    return made


class Delays:
    """Random host and device sleeps of 0 to 5 ms on some ranks at a time."""

    def __init__(self, lockstep: Lockstep, seed: int) -> None:
        self.lockstep, self.random = lockstep, lockstep.own_random(seed)

    def host(self) -> None:
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 0.005)

    def device(self) -> None:
        if self.lockstep.cuda and self.random.random() < 0.2:
            self.lockstep.sleep_on_device(self.random.random() * 0.005)


class Verdict:
    """Record wrong calls: one device bool per call."""

    def __init__(self, lockstep: Lockstep, calls: int) -> None:
        self.lockstep, self.wrong, self.names = (
            lockstep,
            torch.zeros(calls, dtype=torch.bool, device=lockstep.device),
            [""] * calls,
        )

    def note(self, call: int, name: str, outs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        self.names[call] = name
        self.wrong[call] = cases.differs(outs, expected)

    def check(self, group: str) -> None:
        self.lockstep.sync()
        session.check(group)
        bad = self.wrong.nonzero().flatten().tolist()
        if bad:
            first = ", ".join(f"{i} ({self.names[i]})" for i in bad[:5])
            raise AssertionError(f"{len(bad)} of {len(self.names)} calls are wrong; the first: {first}")


def loop(lockstep: Lockstep, group: str, kinds: list[str], calls: int, lanes: int = 1) -> str:
    """Run `calls` calls of random sites and versions under random delays. `lanes`: number of streams."""
    if lanes > 1 and not lockstep.cuda:
        pytest.skip("the CPU has no streams")
    places = sites(lockstep, group, kinds)
    order, delays, verdict = lockstep.shared_random(7), Delays(lockstep, 11), Verdict(lockstep, calls)
    streams: list[Any] = [torch.cuda.Stream() for _ in range(lanes)] if lanes > 1 else [None]
    # One input set per stream: the other stream's call may still read its own.
    sets = [[Site(p.strategy, p.name, p.versions, p.expected, cloned(p.static)) for p in places] for _ in range(lanes)]
    lockstep.sync()
    clock = time.monotonic()
    for call in range(calls):
        site, version = sets[call % lanes][order.randrange(len(places))], order.randrange(VERSIONS)
        delays.host()
        with torch.cuda.stream(streams[call % lanes]):
            delays.device()
            site.load(version)
            outs = site.call(group)
            site.spoil()
            verdict.note(call, site.name, outs, site.expected[version])
        if call % 100 == 99:
            verdict.check(group)
    verdict.check(group)
    return f"{calls} calls in {time.monotonic() - clock:.1f} s, bitwise"


def cloned(case: Case) -> Case:
    return with_tensors(case, [t.clone() for t in tensors_of(case)])


def replays(lockstep: Lockstep, group: str, kinds: list[str], count: int) -> str:
    """Replay a graph of one call per kind with changing inputs under delays. Every fifth iteration is eager instead."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    places = sites(lockstep, group, kinds)
    order, delays, verdict = lockstep.shared_random(17), Delays(lockstep, 21), Verdict(lockstep, count)
    captured = torch.cuda.CUDAGraph()
    lockstep.sync()
    lockstep.barrier()
    # thread_local: NCCL's watchdog queries events on its own thread.
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        outs = [site.call(group) for site in places]
    lockstep.sync()
    lockstep.barrier()
    clock = time.monotonic()
    for turn in range(count):
        versions = [order.randrange(VERSIONS) for _ in places]
        delays.host()
        delays.device()
        for site, version in zip(places, versions, strict=True):
            site.load(version)
        if order.random() < 0.2:
            found, what = [site.call(group) for site in places], "eager"
        else:
            captured.replay()
            found, what = outs, "replay"
        for site in places:
            site.spoil()
        expected = [t for site, version in zip(places, versions, strict=True) for t in site.expected[version]]
        verdict.note(turn, what, [t for out in found for t in out], expected)
        if turn % 100 == 99:
            verdict.check(group)
    verdict.check(group)
    seconds = time.monotonic() - clock
    del captured
    return f"{count} turns of {len(kinds)} ops in {seconds:.1f} s, a fifth of them eager, bitwise"


QUICK = ("AG only", "RS only", "direct", "mixed", "float8")


def calls_of(lockstep: Lockstep) -> int:
    return 200 if lockstep.quick else 1000


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in LOOPS])
def test_eager_calls(lockstep: Lockstep, group: str, name: str) -> None:
    lockstep.note(loop(lockstep, group, LOOPS[name], calls_of(lockstep)))


@pytest.mark.deadline(120)
def test_eager_calls_on_two_streams(lockstep: Lockstep, group: str) -> None:
    lockstep.note(loop(lockstep, group, LOOPS["mixed"], calls_of(lockstep) // 2, lanes=2))


@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    "name",
    ["mixed", "float8", pytest.param("AG only", marks=pytest.mark.full), pytest.param("RS only", marks=pytest.mark.full)],
)
def test_replays(lockstep: Lockstep, group: str, name: str) -> None:
    lockstep.note(replays(lockstep, group, LOOPS[name], calls_of(lockstep)))
