"""Sessions: how the ranks of a group find each other, agree, grow, and part. All of it through the group's c10d Store.

A *session* is one group on one device type, made at the group's first call (`bind`, called by C++). Its steps are all-to-all
exchanges of small JSON texts with a deadline (`Exchange.all`), so a rank that does not come is named, whatever the step:

    card       host, versions, wanted slot size        -> all on one host? then shared memory, else plain c10d
    peers      CUDA: ranks whose GPU cannot be reached -> none? then symmetric memory, else plain c10d
    arena      names of the shared memory segments     -> attach to all peers'
    attached   nothing                                 -> unlink: from here on nothing can be left in /dev/shm
    made       CUDA: size of the slots allocated       -> torch's rendezvous; met: all words are zero
    plan/N     digest of the N-th plan                 -> equal; else text/N, and PlanMismatchError at the site that differs
    grow/N     name of the bigger segment              -> attach; grown/N: all have moved, the old one is let go

A rank that fails says so under "failed", so that the others fail at once, and with its text. The Store itself may fail or fall
silent with the process that hosts it; c10d waits for it without a deadline, so it is asked on a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ub_overlap import _torch_compat

from . import errors, plan_store, settings
from .extension import extension

log = logging.getLogger(__name__)

_GRAIN = 1 << 16
_FIRST_SLOT = 1 << 18
_MOST_SPARE = 1 << 26


def host_id() -> str:
    """Equal for two processes exactly when they can share memory: same machine, same boot, same /dev/shm.

    And the same process ids, by which peers see that a rank is gone (containers may share the rest)."""
    pretended = extension().testing.host_id()
    if pretended:
        return pretended
    boot = pids = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    with contextlib.suppress(OSError):
        pids = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}:{boot}:{os.stat('/dev/shm').st_dev}:{pids}"


def slot_size(needed: int, held: int = 0) -> int:
    """Bytes of a slot that must hold `needed`: at least double what is `held` (or 64 MiB more), so that growth is rare."""
    size = max(needed, held + min(held, _MOST_SPARE), _FIRST_SLOT)
    return -(-size // _GRAIN) * _GRAIN


T = TypeVar("T")


def _within(timeout_s: float, body: Callable[[threading.Event], T]) -> T:
    """What `body` returns or raises, or TimeoutError. It runs on a daemon thread, for it may block for ever; the event that it
    is given is set once nobody waits for it any more."""
    over, outcome = threading.Event(), Future[T]()

    def run() -> None:
        try:
            outcome.set_result(body(over))
        except BaseException as error:  # noqa: BLE001  (raised again by the thread that waits)
            outcome.set_exception(error)

    threading.Thread(target=run, name="ub_overlap-store", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    finally:
        over.set()


class Exchange:
    """All-to-all exchanges of texts between the ranks of a group, each under a topic that is used once.

    `op`, `site`: the call that needs them, for errors.
    """

    def __init__(
        self, store: Any, group: str, device: str, rank: int, ranks: int, op: str, site: str, timeout_s: float
    ) -> None:
        self.store, self.group, self.rank, self.ranks = store, group, rank, ranks
        self.op, self.site = op, site
        self._silent = False  # the Store has not answered: whoever asks it again may never return
        # The same store may serve several lives of a group name: count them. All ranks live through the same ones.
        life = self._ask(lambda _: store.add(f"ub_overlap/{device}/lives/{rank}", 1), timeout_s, {})
        self._prefix = f"ub_overlap/{device}/{life}"

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{rank}"

    def fail(self, text: str) -> None:
        """Tell whoever waits for this rank that it will not come."""
        with contextlib.suppress(Exception):
            if not self._silent:
                self.store.set(self._key("failed", self.rank), text)

    def peek(self, topic: str) -> dict[int, dict[str, Any]]:
        """What is there by now, without waiting."""
        found = {}
        for rank in range(self.ranks if not self._silent else 0):
            with contextlib.suppress(Exception):
                if self.store.check([self._key(topic, rank)]):
                    found[rank] = json.loads(self.store.get(self._key(topic, rank)))
        return found

    def all(
        self, topic: str, mine: dict[str, Any], timeout_s: float, doing: str, check: Callable[[], None] | None = None
    ) -> list[dict[str, Any]]:
        """Every rank's text, in rank order. `doing` completes "... did not come to ..."; `check` may raise while we wait."""
        found: dict[int, dict[str, Any]] = {self.rank: mine}
        self._ask(lambda over: self._collect(topic, found, timeout_s, doing, check, over), timeout_s, found, check)
        return [found[rank] for rank in range(self.ranks)]

    def _ask(
        self,
        body: Callable[[threading.Event], T],
        timeout_s: float,
        found: dict[int, Any],
        check: Callable[[], None] | None = None,
    ) -> T:
        """`body`, which asks the Store, with the Store's own failures as errors of ours."""
        try:
            return _within(1.25 * timeout_s, body)  # `body` has a deadline of its own, as long as the Store answers
        except errors.UbOverlapError:
            raise
        except TimeoutError:
            self._silent = True
            what = f"the Store of group '{self.group}' did not answer within {1.25 * timeout_s:g} s"
        except RuntimeError as broken:  # all errors of c10d
            self._silent = True
            what = f"the Store of group '{self.group}' failed: {str(broken).splitlines()[0]}"
        with contextlib.suppress(errors.PeerFailedError):  # a peer that only met the same as this rank
            if check:
                check()  # names the peer that has taken the Store with it, where that can be seen
        missing = [rank for rank in range(self.ranks) if rank not in found and rank != self.rank]
        fix = "look at the process that hosts the Store: rank 0 of the world, or the launcher"
        raise self._late(what, missing, "store", f"{errors.ranks_text(missing)} unheard", fix)

    def _late(self, what: str, missing: Sequence[int], phase: str, got: str, fix: str) -> errors.PeerTimeoutError:
        where = f"{self.op} at site '{self.site}', group '{self.group}' of {self.ranks} ranks; noticed by rank {self.rank}"
        error = errors.PeerTimeoutError(what, where=where, got=got, expected=f"{self.ranks} ranks", fix=fix)
        error.ranks, error.phase, error.reporter = tuple(missing), phase, self.rank
        error.op, error.site = self.op, self.site
        return error

    def _collect(
        self,
        topic: str,
        found: dict[int, dict[str, Any]],
        timeout_s: float,
        doing: str,
        check: Callable[[], None] | None,
        over: threading.Event,
    ) -> None:
        self.store.set(self._key(topic, self.rank), json.dumps(found[self.rank]))
        deadline, pause = time.monotonic() + timeout_s, 0.0005
        stopped: Exception | None = None
        while not over.is_set():
            for rank in range(self.ranks):
                if rank not in found and self.store.check([self._key(topic, rank)]):
                    found[rank] = json.loads(self.store.get(self._key(topic, rank)))
            missing = [rank for rank in range(self.ranks) if rank not in found]
            if not missing:
                return
            if stopped:
                raise stopped
            stopped = self._stopped(missing, check)
            if stopped:
                continue  # what a peer said before it gave up counts first: look once more
            if time.monotonic() > deadline:
                who = errors.ranks_text(missing)
                what = f"{who} of the group did not come to {doing} within {timeout_s:g} s"
                setting = "STEP" if topic.startswith("grow") else "INIT"
                fix = f"look at the log and the stack of {who}; if it is only slow, raise UB_OVERLAP_{setting}_TIMEOUT_S"
                raise self._late(what, missing, topic, errors.ranks_text(sorted(found)), fix)
            over.wait(pause)
            pause = min(pause * 1.5, 0.02)

    def _stopped(self, missing: Sequence[int], check: Callable[[], None] | None) -> Exception | None:
        try:
            if check:
                check()
        except errors.UbOverlapError as error:
            return error
        for rank in missing:
            if self.store.check([self._key("failed", rank)]):
                text = self.store.get(self._key("failed", rank)).decode()
                return errors.make("PeerFailedError", {"ranks": str(rank), "got": text, "op": self.op, "site": self.site})
        return None


class Session:
    """One group on one device type. `core` is what C++ runs calls with; it calls `verify` and `grow` when it needs them."""

    def __init__(self, core: Any, exchange: Exchange | None, arena: Any) -> None:
        self.core = core
        self._exchange, self._arena = exchange, arena
        self._plans = self._growths = 0

    def verify(self, digest: str, op: str, site: str) -> None:
        """All ranks must be about to run the same plan. PlanMismatchError names those that are not, and where it starts."""
        exchange, timeout_s = self._exchange, settings.current().init_timeout_s
        if exchange is None:
            return
        exchange.op, exchange.site = op, site
        self._plans += 1
        topic, doing = f"plan/{self._plans}", f"the first call of plan {digest}"
        try:
            cards = exchange.all(topic, {"digest": digest, "site": site}, timeout_s, doing, self._check)
            other = [rank for rank, card in enumerate(cards) if card["digest"] != digest]
            if other:  # all ranks see that: now the texts, which are long, are worth a look
                mine = {"text": plan_text(digest)}
                texts = exchange.all(f"text/{self._plans}", mine, timeout_s, "compare plans", self._check)
                raise plan_mismatch(exchange, [{**card, **text} for card, text in zip(cards, texts, strict=True)], other)
        except BaseException as error:  # also Ctrl-C: a group without an arena has no other way to hear of it
            exchange.fail(f"{type(error).__name__}: {error}")
            raise

    def grow(self, needed: int, op: str, site: str) -> None:
        """Bigger slots on all ranks, in step: all of them see the same sizes at the same call."""
        exchange, arena, timeout_s = self._exchange, self._arena, settings.current().step_timeout_s
        if exchange is None or arena is None:
            raise AssertionError("a session without an arena cannot grow")
        exchange.op, exchange.site = op, site
        self._growths += 1
        before, size = arena.slot_bytes, slot_size(needed, arena.slot_bytes)
        doing = f"a call that needs {needed} bytes of landing area"
        try:
            arena.grow_begin(size)
            mine = {"name": arena.data_name, "size": size, "needed": needed}
            cards = exchange.all(f"grow/{self._growths}", mine, timeout_s, doing, self._check)
            for rank, card in enumerate(cards):
                if card["needed"] != needed:
                    raise size_mismatch(exchange, rank, card["needed"], needed)
            for rank, card in enumerate(cards):  # once all agree: a rank that does not takes its names away
                if rank != exchange.rank:
                    arena.grow_attach(rank, card["name"])
            exchange.all(f"grown/{self._growths}", {}, timeout_s, doing, self._check)
        finally:
            arena.unlink()
        arena.grow_commit()
        log.info("group '%s': landing area grew from %d to %d bytes a slot", exchange.group, before, size)

    def _check(self) -> None:
        """Raises when a peer of this group has given up, or is gone."""
        if self._arena is not None and self._exchange is not None:
            self._arena.check(self._exchange.op, self._exchange.site)


def bind(group: str, device: str, slot_bytes: int, op: str, site: str) -> Session:
    """The session of a group, made together with its other ranks. PeerTimeoutError names the ranks that do not come."""
    process_group = _torch_compat.group_of(group)
    rank, ranks = process_group.rank(), process_group.size()
    if ranks == 1:
        return _session(group, device, rank, ranks, None, None, "local", "a group of one rank")
    store, timeout_s = _torch_compat.store_of(process_group), settings.current().init_timeout_s
    exchange = Exchange(store, group, device, rank, ranks, op, site, timeout_s)
    try:
        session = _bind(exchange, group, device, rank, ranks, slot_bytes)
    except BaseException as error:  # also Ctrl-C: the others need not wait for this rank
        exchange.fail(f"{type(error).__name__}: {error}")
        _sweep(exchange)
        raise
    log.info("group '%s' on %s: rank %d of %d, transport %s", group, device, rank, ranks, session.core.transport)
    return session


def _session(
    group: str, device: str, rank: int, ranks: int, exchange: Exchange | None, arena: Any, transport: str, reason: str
) -> Session:
    memory = getattr(arena, "core", arena)
    core = extension().Session(
        group=group, device=device, rank=rank, ranks=ranks, arena=memory, transport=transport, reason=reason
    )
    return Session(core, exchange, arena)


def _bind(exchange: Exchange, group: str, device: str, rank: int, ranks: int, slot_bytes: int) -> Session:
    c, timeout_s = extension(), settings.current().init_timeout_s
    doing = f"the first call of group '{group}'"
    info = c.build_info()
    versions = {"version": info["version"], "torch": info["torch"]}
    card = {**versions, "host": host_id(), "slot": slot_bytes}
    from . import symmetric

    if device == "cuda":
        symmetric.refuse_capture(f"bind group '{group}'")
        card["gpu"] = symmetric.gpu()
    cards = exchange.all("card", card, timeout_s, doing)
    for other, their in enumerate(cards):
        theirs = {key: their[key] for key in versions}
        if theirs != versions:
            raise errors.BuildMismatchError(
                f"ranks {rank} and {other} of the group run different builds",
                got=f"rank {other}: {theirs}",
                expected=f"rank {rank}: {versions}",
                fix="install the same ub_overlap and torch on all ranks",
            )
    hosts = sorted({their["host"] for their in cards})
    if len(hosts) > 1:
        names = sorted({host.split(":")[0] for host in hosts})
        reason = f"its ranks do not share memory ({len(hosts)} hosts: {', '.join(names)})"
        log.info("group '%s': plain c10d collectives, because %s", group, reason)
        return _session(group, device, rank, ranks, exchange, None, "c10d", reason)

    wanted = slot_size(max(their["slot"] for their in cards))
    if device == "cuda":
        gpus = [their["gpu"] for their in cards]
        verdicts = exchange.all("peers", {"cannot": symmetric.unreachable(gpus, rank)}, timeout_s, doing)
        why = symmetric.reason(gpus, [their["cannot"] for their in verdicts])
        if why is not None:
            log.info("group '%s': plain c10d collectives, because %s", group, why)
            return _session(group, device, rank, ranks, exchange, None, "c10d", why)

    # On CUDA the slots lie elsewhere: shared memory then holds what hosts tell each other.
    arena = c.ShmArena(rank=rank, ranks=ranks, slot_bytes=_GRAIN if device == "cuda" else wanted)
    try:
        mine = {"control": arena.control_name, "data": arena.data_name}
        for other, names in enumerate(exchange.all("arena", mine, timeout_s, doing)):
            if other != rank:
                arena.attach(other, names["control"], names["data"])
        exchange.all("attached", {}, timeout_s, doing)
    finally:
        arena.unlink()
    if device != "cuda":
        return _session(group, device, rank, ranks, exchange, arena, "shared memory", "")
    shared = symmetric.SymmetricArena(arena, group, rank, ranks, wanted)
    exchange.all("made", {"slot": wanted}, timeout_s, doing)
    shared.meet()
    exchange.all("met", {}, timeout_s, doing)
    log.info("group '%s': %d bytes of symmetric memory a slot, deadline %g s", group, wanted, settings.current().step_timeout_s)
    return _session(group, device, rank, ranks, exchange, shared, "symmetric memory", "")


def _sweep(exchange: Exchange) -> None:
    """A bind failed: remove the segments of peers that can no longer do it themselves."""
    for names in exchange.peek("arena").values():
        for name in names.values():
            extension().unlink_name(name)


def plan_text(digest: str) -> str | None:
    """The text of a plan where this machine has it. Never an error: it only makes a mismatch readable."""
    try:
        return plan_store.load(digest)
    except (OSError, ValueError):
        return None


def plan_mismatch(exchange: Exchange, cards: Sequence[dict[str, Any]], other: Sequence[int]) -> errors.PlanMismatchError:
    rank, first = exchange.rank, other[0]
    mine, theirs = cards[rank], cards[first]
    difference = first_difference(mine["text"], theirs["text"])
    if difference is None:
        here, there = f"plan {mine['digest']}, at site '{mine['site']}'", f"plan {theirs['digest']}, at site '{theirs['site']}'"
    else:
        here, there = difference
    error = errors.PlanMismatchError(
        f"{errors.ranks_text(other)} of the group compiled another plan than rank {rank}",
        where=f"group '{exchange.group}' at site '{mine['site']}'",
        got=f"rank {first}: {there}",
        expected=f"rank {rank}: {here}",
        fix="give all ranks the same model, shapes, options and device profile; look for rank-dependent code",
    )
    error.ranks = tuple(other)
    return error


def first_difference(mine: str | None, theirs: str | None) -> tuple[str, str] | None:
    """The first site that two plans do not have in common, as each of them has it; None where that cannot be told."""

    def show(site: Any) -> str:
        if not isinstance(site, dict):
            return "no such site"
        first = [f"{key}={site[key]}" for key in ("id", "kind", "strategy") if key in site]
        return " ".join(first) or json.dumps(site)

    try:
        a, b = (json.loads(text or "")["sites"] for text in (mine, theirs))
    except (ValueError, KeyError, TypeError):
        return None
    for i in range(max(len(a), len(b))):
        x, y = (sites[i] if i < len(sites) else None for sites in (a, b))
        if x != y:
            if show(x) != show(y) or not (isinstance(x, dict) and isinstance(y, dict)):
                return f"site {show(x)}", f"site {show(y)}"
            keys = [key for key in sorted({*x, *y}) if x.get(key) != y.get(key)]
            return tuple(f"site {show(s)} " + " ".join(f"{k}={s.get(k)}" for k in keys) for s in (x, y))  # type: ignore[return-value]
    return None


def size_mismatch(exchange: Exchange, rank: int, got: int, expected: int) -> errors.ShapeMismatchError:
    error = errors.ShapeMismatchError(
        f"ranks {exchange.rank} and {rank} brought different sizes to one call",
        where=f"{exchange.op} at site '{exchange.site}', group '{exchange.group}'",
        got=f"rank {rank}: {got} bytes of landing area",
        expected=f"rank {exchange.rank}: {expected} bytes",
        fix="give all ranks of a group the same shapes and dtypes, or disable the site",
    )
    error.ranks = (rank,)
    return error


def check(group: str | None = None) -> None:
    """Raise what has gone wrong so far in `group`, or in any group. On CUDA a call returns before its peers have come: what
    fails then shows at the next op of the group, or here. Look after torch.cuda.synchronize() to know about all calls."""
    for core in extension().sessions():
        if group is None or core.group == group:
            core.check()


def close(group: str | None = None, device: str = "cpu") -> None:
    """Let go of the session of `group`, or of all sessions. May be called any number of times; the group can bind again only
    if all its ranks do so."""
    if group is None:
        extension().close_all()
    else:
        extension().close(group, device)
