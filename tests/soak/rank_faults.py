"""Rank functions of the fault matrix: one rank, the victim, fails. Every living rank returns its observations.

Ranks are processes of tests/harness/outcomes.py, with a gloo world. Every function returns a `Seen` as a dict. `kind`: the op
(tests/gpu/cases.py), or "graph". `how`: the variant of the fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ub_overlap
from tests.gpu.cases import Truth
from tests.harness.limits import limited, mapped_bytes, no_more_threads
from tests.harness.strike import signal_before_exchange, signal_before_message
from ub_overlap.runtime import ops, plan_store
from ub_overlap.runtime.session import session
from ub_overlap.runtime.session.plan_announcements import announce_plan

from .rank_programs import run_step
from .scene import Scene
from .steps import PROGRAMS, STEPS

LOOP_S = 30.0
"""Seconds after which a loop of calls without an error ends."""


def dies(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """Send the signal `how` to the victim while all ranks call in a loop. SIGINT raises KeyboardInterrupt there."""
    scene = Scene(rank, world, device, kind, deadline, victim)
    # The areas of "A2A rounds" grow at the 17th call: strike before.
    scene.strike_later(lambda: os.kill(os.getpid(), getattr(signal, how)), 0.05 if kind == "A2A rounds" else 0.5)
    return scene.finish(scene.call_until_error(LOOP_S + 3 * deadline))


def shrinks(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim gets the signal `how` in a loop of calls. The others leave the world, make one of themselves, and go on.

    `after`: what is wrong with their further calls, or steps.
    """
    scene = Scene(rank, world, device, kind, deadline, victim)
    scene.strike_later(lambda: os.kill(os.getpid(), getattr(signal, how)))
    seen = scene.call_until_error(LOOP_S + 3 * deadline)
    ub_overlap.abort()
    dist.destroy_process_group()
    torch.compiler.reset()  # compiled graphs hold names of groups
    store, living = dist.PrefixStore("living", scene.store), [r for r in range(world) if r != victim]
    rank, world = living.index(rank), len(living)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    if kind in STEPS:
        program = PROGRAMS[kind](scene.device)
        seen.after = ", ".join(filter(None, [run_step(program, seed=0, number=number) for number in range(3)]))
    else:
        rest = Scene(rank, world, device, kind, deadline, victim=-1)
        truth = Truth.of(rest.case, rest.group)
        for _ in range(3):
            truth.check(rest.op(), "after the recovery")
    return asdict(seen)


def at_message(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim gets a signal when it is about to issue a message of a pipeline. `how`: "message:signal" (strike.py)."""
    scene = Scene(rank, world, device, kind, deadline, victim)
    message, _, name = how.partition(":")
    if scene.is_victim:
        signal_before_message(message, name, scene.record_fault)
    return scene.finish(scene.call_until_error(LOOP_S + 3 * deadline))


def orphans(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """Send the signal `how` to the victim, whose child keeps its connections open, as a data loader's worker may."""
    scene = Scene(rank, world, device, kind, deadline, victim)

    def strike() -> None:
        if os.fork() == 0:
            time.sleep(LOOP_S + 3 * deadline)
            os._exit(0)
        os.kill(os.getpid(), getattr(signal, how))

    scene.strike_later(strike)
    return scene.finish(scene.call_until_error(LOOP_S + 3 * deadline))


def leaves(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim stops calling: its program raises (`how` "raises"), ends ("exits"), or fails within an op ("in_op")."""
    scene = Scene(rank, world, device, kind, deadline, victim)
    for _ in range(3):
        scene.call()
    scene.settle()
    if not scene.is_victim:
        return scene.finish(scene.call_until_error(LOOP_S + 3 * deadline))
    scene.record_fault()
    if how == "in_op":

        def refuse(key: Any, rank: int) -> Any:
            raise MemoryError("no room for schedules")

        ops.extension().set_provider(refuse)
        scene.call()
    if how == "raises":
        raise ValueError("the victim's own error")
    return {}


def binds(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim fails before the group's first call, or within it.

    `how`: "exits" or "sleeps" before the call, "compiled" to exit after it compiled a graph of the group, a signal before the
    call, or "topic:signal" within it.
    """
    scene = Scene(rank, world, device, kind, deadline, victim, bound=False)
    begin = time.time()
    if scene.is_victim:
        topic, _, name = how.rpartition(":")
        if how == "compiled":
            announce_plan([scene.group], "graph", "a" * 16)
        if how in ("exits", "compiled"):
            return {}
        if how == "sleeps":
            time.sleep(LOOP_S + 3 * deadline)
        elif topic:
            signal_before_exchange(topic, name)
        else:
            os.kill(os.getpid(), getattr(signal, name))

    def body() -> None:
        scene.outs = scene.op()
        scene.look()

    return scene.finish(scene.attempt(body, lambda: begin))


def grows(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim gets a signal while the arena grows. `how`: "topic:signal"."""
    scene = Scene(rank, world, device, kind, deadline, victim)
    case, _ = scene.make.kind(scene.kind, 16 * scene.size)
    scene.settle()
    begin = time.time()
    if scene.is_victim:
        topic, _, name = how.rpartition(":")
        signal_before_exchange(topic, name)

    def body() -> None:
        scene.op(site="fault.grows", case=case)
        scene.look()

    return scene.finish(scene.attempt(body, lambda: begin))


def starves(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim may open no further file, map no further memory, or start no further thread.

    `how`: "first:" call of the group, a "later:" one, which needs larger memory, or one that waits for "late:" peers; then
    "files", "memory" or "threads".
    """
    when, _, what = how.partition(":")
    scene = Scene(rank, world, device, kind, deadline, victim, bound=when != "first")
    case = scene.make.kind(scene.kind, 16 * scene.size)[0] if when == "later" else None
    begin = time.time()

    def body() -> None:
        if when == "late" and not scene.is_victim:
            time.sleep(1.0)
        with starved(what) if scene.is_victim else contextlib.nullcontext():
            scene.op(site=f"fault.starves.{when}", case=case)
        scene.look()

    seen = scene.attempt(body, lambda: begin)
    dist.barrier()  # a victim without threads cannot tell its peers, which come to the further call only after their deadline
    return scene.finish(seen)


def starved(what: str) -> contextlib.AbstractContextManager[None]:
    """Let this process open no further file, start no further thread, or map no further memory of any size that counts."""
    if what == "threads":
        return no_more_threads()
    if what == "memory":
        return limited(resource.RLIMIT_AS, mapped_bytes() + (64 << 10))
    with open(os.devnull) as file:
        return limited(resource.RLIMIT_NOFILE, file.fileno())  # the lowest that is free


def skips(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim skips its last call (`how` "last"), or skips it and calls another site (`how` "next")."""
    scene = Scene(rank, world, device, kind, deadline, victim)
    for _ in range(3):
        scene.call()
    scene.settle()
    begin = time.time()

    def body() -> None:
        if not scene.is_victim:
            scene.call()
            scene.look()
            if kind == "message":  # a rank that waits for another than the victim hears of it from that one
                scene.watch(LOOP_S)
        elif how == "next":
            scene.outs = scene.op(site="fault.next")
            scene.look()
        else:
            others = [f"done/{other}" for other in range(world) if other != victim]
            scene.store.wait(others, timedelta(seconds=4 * deadline + 10))
            session.check(scene.group)

    seen = scene.attempt(body, lambda: begin)
    scene.store.set(f"done/{rank}", "1")
    if scene.is_victim and how == "last":
        scene.outs = scene.expected  # of its last call before the fault
    return scene.finish(seen)


def between(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim starts a split collective and fails before its finish. The other ranks finish it, and go on.

    `how`: a signal, "sleeps", or "abandons": the victim frees the token, as an exception does, and goes on with the next call.
    """
    scene = Scene(rank, world, device, kind, deadline, victim)
    for _ in range(3):
        scene.call()
    scene.settle()
    begin = time.time()

    def fail() -> None:
        if how == "sleeps":
            time.sleep(LOOP_S + 3 * deadline)
        elif how != "abandons":
            os.kill(os.getpid(), getattr(signal, how))

    def body() -> None:
        scene.outs = []
        token = scene.start()
        if scene.is_victim:
            fail()
            del token
        else:
            scene.outs = scene.finish_start(token)
            scene.look()
        scene.call()
        scene.look()

    seen = scene.attempt(body, lambda: begin)
    if scene.is_victim == (seen.error != "SiteMismatchError"):
        seen.notes = f"raised {seen.error}"
    return scene.finish(seen)


def aborts(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim aborts the group from a thread: `how` "busy", within a call that the others make later, or "idle"."""
    scene = Scene(rank, world, device, kind, deadline, victim)
    scene.strike_later(lambda: ub_overlap.abort(reason="a fault trial"))

    def body() -> None:
        if not scene.is_victim and how == "busy":
            scene.store.wait(["fault"], timedelta(seconds=30))
            time.sleep(0.2)
        if scene.is_victim and how == "idle":
            time.sleep(1.0)
        else:
            scene.call()
        scene.look()

    seen = scene.attempt(body, scene.fault_time)
    if scene.is_victim and how == "idle":
        scene.outs = scene.expected  # of its last call before the fault
    if seen.seconds > deadline / 2:
        seen.notes = f"raised {seen.seconds:.1f} s after the abort"
    if seen.error != ("GroupAbortedError" if scene.is_victim else "PeerFailedError"):
        seen.notes = f"raised {seen.error}"
    return scene.finish(seen)


def differs(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim passes another shape or dtype, calls another site, or has another plan. The arena does not grow."""
    scene = Scene(rank, world, device, kind, deadline, victim)
    odd = how if scene.is_victim else ""
    dtype = torch.float16 if odd == "dtype" else torch.bfloat16
    case, _ = scene.make.kind(scene.kind, scene.size // 2 + (16 if odd == "shape" else 0), dtype)
    site = f"fault.{'two' if odd == 'site' else 'one'}"
    if how == "plan":
        digest = ("b" if odd else "a") * 16
        sites = [{"id": "forward.0", "kind": case[0], "strategy": "bulk" if odd else "pipelined"}]
        plan_store.save(digest, json.dumps({"shared": {"sites": sites}}))
        site = f"{digest}/forward.0"
    scene.settle()
    begin = time.time()

    def body() -> None:
        scene.outs = scene.op(site=site, case=case)
        scene.look()

    scene.outs = []
    seen = scene.attempt(body, lambda: begin)
    scene.expected = [torch.zeros_like(t) for t in scene.outs]  # only NaN is right
    return scene.finish(seen)


def withholds(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim stops before a send, with a receive in flight that it has not waited for. `how`: "sleeps", or a signal.

    The rank behind it waits for the send. Blame must not go on to the source of the receive, which owes nothing yet.
    """
    scene = Scene(rank, world, device, kind, deadline, victim)
    tensor = torch.zeros(1024, device=scene.device)
    ub_overlap.initialize_point_to_point(scene.group, tensor.nbytes, device=scene.device)
    scene.settle()
    begin = time.time()
    if scene.is_victim:
        time.sleep(deadline / 2)  # its own receive has a deadline too, which comes later then
        ub_overlap.irecv(tensor, group=scene.group, group_src=(victim + 1) % world)
        if how == "sleeps":
            time.sleep(LOOP_S + 3 * deadline)
        os.kill(os.getpid(), getattr(signal, how))

    def body() -> None:
        if rank == (victim - 1) % world:
            ub_overlap.recv(tensor, group=scene.group, group_src=victim)
        scene.watch(LOOP_S)

    return scene.finish(scene.attempt(body, lambda: begin))


def slow(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim is late by 0.6 of the deadline, on the host or on the device. Expect no error and right numbers."""
    scene = Scene(rank, world, device, kind, deadline, victim)

    def be_late() -> None:
        if how == "device" and scene.cuda:
            torch.cuda._sleep(int(0.6 * deadline * 1.8e9))
        else:
            time.sleep(0.6 * deadline)

    return _expect_right(scene, be_late)


def forks(rank: int, world: int, device: str, kind: str, how: str, deadline: float, victim: int) -> dict[str, Any]:
    """The victim forks a child that calls an op of the group. The child gets a ForkError, and nothing else happens.

    `how`: "bound", or "unbound" for a fork before the group's first call.
    """
    scene = Scene(rank, world, device, kind, deadline, victim, bound=how == "bound")

    def fork() -> None:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            seen = scene.attempt(scene.call, time.time)
            os.write(send, seen.error.encode() or b"no error")
            os._exit(0)
        os.waitpid(child, 0)
        name = os.read(receive, 1000).decode()
        assert name == "ForkError", f"the child got {name}"

    if how == "unbound":
        if scene.is_victim:
            fork()
        dist.barrier()
        scene.expected = [t.clone() for t in scene.op()]
        return _expect_right(scene, lambda: None)
    return _expect_right(scene, fork)


def _expect_right(scene: Scene, disturb: Callable[[], None]) -> dict[str, Any]:
    """Disturb the victim before each of two calls. Their results must be right."""
    begin = time.time()

    def body() -> None:
        for _ in range(2):
            if scene.is_victim:
                disturb()
            scene.call()
            scene.look()
            bad = [i for i, (a, b) in enumerate(zip(scene.outs, scene.expected, strict=True)) if not torch.equal(a, b)]
            assert not bad, f"outputs {bad} are wrong"

    seen = scene.attempt(body, lambda: begin)
    seen.seconds = time.time() - begin
    return asdict(seen)
