"""Sessions: how the ranks of a group find each other, agree, grow, and part. All of it through the group's c10d Store.

A *session* is one group on one device type, made at the group's first call (`bind`, called by C++). Its steps are all-to-all
exchanges of small JSON texts with a deadline (runtime/session/store_exchange.py), so a rank that does not come is named, whatever the step:

    card       host, GPU, versions, wanted slot size   -> which transport (runtime/session/topology.py)
    links      CUDA: what each GPU sees of the others
    arena      names of the shared memory segments     -> attach to all peers'
    attached   nothing                                 -> unlink: from here on nothing can be left in /dev/shm
    made       CUDA: size of the slots allocated       -> torch's rendezvous; met: all words are zero
    plan/N     digest of the N-th plan                 -> equal; else text/N with the graphs, and PlanMismatchError at the
               site and at the node that differ;
               also for `initialize`, with the slot size wanted -> grow to the largest
    tune/N     runtime/autotune.py: what is known of a site's alternatives, tuned/N: what they took
    grow/N     name of the bigger segment              -> attach; grown/N: all have moved, the old one is let go
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ub_overlap import _torch_compat

from .. import errors, settings
from ..autotune import Tuner
from ..extension import extension
from ..site_id import SiteId
from . import plan_announcements, plan_graphs, topology, watchdog
from .plan_mismatch import plan_mismatch, plan_text
from .store_exchange import Exchange

log = logging.getLogger(__name__)

_GRAIN = 1 << 16
_FIRST_SLOT = 1 << 18
_SLOTS = 2  # a rank, as in csrc/core/flags.h


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


def slot_size(needed: int) -> int:
    """Bytes of a slot that must hold `needed`: at most an eighth more, so that sizes that creep up rarely make it grow."""
    size = max(needed, _FIRST_SLOT)
    grain = max(_GRAIN, 1 << (size.bit_length() - 4))
    return -(-size // grain) * grain


class Session:
    """One group on one device type. `core` is what C++ runs calls with; it calls `verify`, `grow` and `tune`."""

    def __init__(self, core: Any, exchange: Exchange | None, arena: Any) -> None:
        self.core = core
        self._exchange, self._arena = exchange, arena
        self._plans = self._growths = self._reservations = 0
        self._reserved = ("", 0)
        # Over plain c10d all alternatives are alike.
        self._tuner = Tuner(exchange if arena is not None else None, str(core.device))

    @property
    def group(self) -> str:
        return str(self.core.group)

    @property
    def slot_bytes(self) -> int:
        """What a call's landing area may take without growth; 0 without an arena (one rank, or plain c10d)."""
        return 0 if self._arena is None else int(self._arena.slot_bytes)

    @property
    def arena_bytes(self) -> int:
        """All slots of this rank."""
        return _SLOTS * self.slot_bytes

    @property
    def growths(self) -> int:
        """How often the arena has grown since it was made."""
        return self._growths

    def reserve(self, slot_bytes: int) -> str:
        """The digest under which the next call makes room for `slot_bytes`, as `verify` then sees it: within a call, so that
        all ranks are in step, and nothing else of this group is under way."""
        self._reservations += 1
        self._reserved = (f"initialize-{self._reservations}", slot_bytes)
        return self._reserved[0]

    def trouble(self) -> errors.UbOverlapError | None:
        """What has gone wrong in this group, without taking it from the next op or from `check`, which raise it."""
        try:
            if self._arena is not None:
                extension().Arena.check(getattr(self._arena, "core", self._arena))
        except errors.UbOverlapError as error:
            return error
        return None

    def verify(self, digest: str, op: str, site: str) -> None:
        """All ranks must be about to run the same plan. PlanMismatchError names those that are not, and where it starts."""
        exchange = self._exchange
        if exchange is None:
            return
        exchange.op, exchange.site = op, site
        self._plans += 1
        topic, doing = f"plan/{self._plans}", f"the first call of plan {digest}"
        try:
            wanted = self._reserved[1] if digest == self._reserved[0] else 0
            try:
                cards = exchange.all(topic, {"digest": digest, "site": site, "slot": wanted}, "init", doing, self._check)
            except errors.PeerTimeoutError as late:
                raise plan_announcements.explained(exchange, topic, digest, late) from None
            other = [rank for rank, card in enumerate(cards) if card["digest"] != digest]
            if other:  # all ranks see that: now the texts, which are long, are worth a look
                raise self._compared(exchange, cards, other)
            wanted = max(card["slot"] for card in cards)
            if self._arena is not None and wanted > self._arena.slot_bytes:
                self.grow(wanted, op, site)
        except BaseException as error:  # also Ctrl-C: a group without an arena has no other way to hear of it
            exchange.fail(f"{type(error).__name__}: {error}")
            raise

    def _compared(self, exchange: Exchange, cards: Sequence[dict[str, Any]], other: Sequence[int]) -> errors.PlanMismatchError:
        """What this rank's plan and that of the first of `other` differ in. Anybody reads the texts of two ranks alone: of rank
        0, and of the first rank with another plan than that."""
        read = (0, next(rank for rank, card in enumerate(cards) if card["digest"] != cards[0]["digest"]))
        digest = cards[exchange.rank]["digest"]
        mine = {"text": plan_text(digest), "graphs": plan_graphs.packed(digest)}
        told = mine if exchange.rank in read else None
        texts = exchange.some(f"text/{self._plans}", told, other[:1], "init", "compare plans", self._check)
        texts[exchange.rank] = mine
        return plan_mismatch(exchange, {rank: {**cards[rank], **text} for rank, text in texts.items()}, other)

    def grow(self, needed: int, op: str, site: str) -> None:
        """Bigger slots on all ranks, in step: all of them see the same sizes at the same call."""
        exchange, arena = self._exchange, self._arena
        if exchange is None or arena is None:
            raise AssertionError("a session without an arena cannot grow")
        exchange.op, exchange.site = op, site
        self._growths += 1
        before, size = arena.slot_bytes, slot_size(needed)
        doing = f"a call that needs {needed} bytes of landing area"
        try:
            arena.grow_begin(size)
            mine = {"name": arena.data_name, "size": size, "needed": needed}
            cards = exchange.all(f"grow/{self._growths}", mine, "step", doing, self._check)
            for rank, card in enumerate(cards):
                if card["needed"] != needed:
                    raise size_mismatch(exchange, rank, card["needed"], needed)
            for rank, card in enumerate(cards):  # once all agree: a rank that does not takes its names away
                if rank != exchange.rank:
                    arena.grow_attach(rank, card["name"])
            exchange.all(f"grown/{self._growths}", {}, "step", doing, self._check)
        finally:
            arena.unlink()
        arena.grow_commit()
        log.info(
            "group '%s': landing area grew from %d to %d bytes a slot (%d of arena), for %s at site '%s'",
            exchange.group, before, size, self.arena_bytes, op, site,
        )  # fmt: skip

    def tune(self, op: str, site: str, bucket: int, work: str, strategies: Sequence[str], run: Callable[[int], bool]) -> int:
        """Which of `strategies` all ranks are to use at a site, -1 where they cannot be timed now."""
        return self._tuner.tune(op, site, bucket, work, strategies, run, self._check)

    def _check(self) -> None:
        """Raises when a peer of this group has given up, or is gone."""
        if self._arena is not None and self._exchange is not None:
            self._arena.check(self._exchange.op, self._exchange.site)


_wanted: dict[tuple[str, str], int] = {}
_bound: weakref.WeakValueDictionary[tuple[str, str], Session] = weakref.WeakValueDictionary()


def want(group: str, device: str, slot_bytes: int) -> None:
    """The size of a slot that `group` is to begin with, should its next call be its first."""
    _wanted[group, device] = slot_bytes


def unwant(group: str, device: str) -> None:
    """It was bound before: nothing is left of `want`."""
    _wanted.pop((group, device), None)


def bound(group: str, device: str) -> Session | None:
    """The session of `group` that was made last in this process, if it is still there."""
    return _bound.get((group, device))


def bind(group: str, device: str, slot_bytes: int, op: str, site: str) -> Session:
    """The session of a group, made together with its other ranks. PeerTimeoutError names the ranks that do not come."""
    process_group = _torch_compat.group_of(group)
    rank, ranks = process_group.rank(), process_group.size()
    slot_bytes = max(slot_bytes, _wanted.pop((group, device), 0))
    if ranks == 1:
        session = _session(group, device, rank, ranks, None, None, "local", "a group of one rank")
    else:
        exchange = Exchange(_torch_compat.store_of(process_group), group, device, rank, ranks, op, site)
        try:
            session = _bind(exchange, group, device, rank, ranks, slot_bytes)
        except BaseException as error:  # also Ctrl-C: the others need not wait for this rank
            exchange.fail(f"{type(error).__name__}: {error}")
            _sweep(exchange)
            raise
    _bound[group, device] = session
    if session.slot_bytes:
        watchdog.watch(session)
    _announce(session)
    return session


def _announce(session: Session) -> None:
    """One line a group: who, where, how, how much memory, how patient."""
    core = session.core
    device = core.device
    if device == "cuda":
        from . import symm_mem

        device = symm_mem.label()
    text = f"group '{core.group}' on {device}: rank {core.rank} of {core.ranks}, transport {core.transport}"
    if session.slot_bytes:
        text += f", {session.slot_bytes} bytes a slot, {session.arena_bytes} bytes of arena"
    if core.transport == "c10d":
        text += f" (plain collectives, because {core.reason})"
    log.info("%s, deadline %g s", text, settings.current().step_timeout_s)


def _session(
    group: str, device: str, rank: int, ranks: int, exchange: Exchange | None, arena: Any, transport: str, reason: str
) -> Session:
    memory = getattr(arena, "core", arena)
    core = extension().Session(
        group=group, device=device, rank=rank, ranks=ranks, arena=memory, transport=transport, reason=reason
    )
    return Session(core, exchange, arena)


def _bind(exchange: Exchange, group: str, device: str, rank: int, ranks: int, slot_bytes: int) -> Session:
    c = extension()
    doing = f"the first call of group '{group}'"
    info = c.build_info()
    versions = {"version": info["version"], "torch": info["torch"]}
    card = {**versions, "host": host_id(), "slot": slot_bytes}
    from . import symm_mem

    if device == "cuda":
        symm_mem.refuse_capture(f"bind group '{group}'")
        card["gpu"] = symm_mem.gpu()
    try:
        cards = exchange.all("card", card, "init", doing)
    except errors.PeerTimeoutError as late:
        raise plan_announcements.explained(exchange, "card", SiteId.parse(exchange.site).digest, late) from None
    for other, their in enumerate(cards):
        theirs = {key: their[key] for key in versions}
        if theirs != versions:
            raise errors.BuildMismatchError(
                f"ranks {rank} and {other} of the group run different builds",
                got=f"rank {other}: {theirs}",
                expected=f"rank {rank}: {versions}",
                fix="install the same ub_overlap and torch on all ranks",
            )
    place = topology.Topology(hosts=tuple(their["host"] for their in cards))
    if device == "cuda" and topology.choose(place).transport != "c10d":
        uuids = [their["gpu"]["uuid"] for their in cards]
        seen = {**symm_mem.links(uuids, rank), "any": settings.current().links == "any"}
        place = topology.described(cards, exchange.all("links", seen, "init", doing))
    choice = topology.choose(place)
    if choice.unknown:
        log.info("group '%s': nobody could tell the links between ranks %s; taken as good", group, _pairs(choice.unknown))
    if choice.transport == "c10d":
        return _session(group, device, rank, ranks, exchange, None, "c10d", choice.reason)

    wanted = slot_size(max(their["slot"] for their in cards))
    # On CUDA the slots lie elsewhere: shared memory then holds what hosts tell each other.
    arena = c.ShmArena(rank=rank, ranks=ranks, slot_bytes=_GRAIN if device == "cuda" else wanted)
    try:
        mine = {"control": arena.control_name, "data": arena.data_name}
        for other, names in enumerate(exchange.all("arena", mine, "init", doing)):
            if other != rank:
                arena.attach(other, names["control"], names["data"])
        exchange.all("attached", {}, "init", doing)
    finally:
        arena.unlink()
    if device != "cuda":
        return _session(group, device, rank, ranks, exchange, arena, "shared memory", "")
    shared = symm_mem.SymmetricArena(arena, group, rank, ranks, wanted)
    cards = exchange.all("made", {"slot": wanted, "name": shared.data_name}, "init", doing)
    shared.meet([card["name"] for card in cards])
    exchange.all("met", {}, "init", doing)
    return _session(group, device, rank, ranks, exchange, shared, "symmetric memory", "")


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    few = ", ".join(f"{i} and {j}" for i, j in pairs[:4])
    return few if len(pairs) <= 4 else f"{few} and {len(pairs) - 4} more pairs"


def _sweep(exchange: Exchange) -> None:
    """A bind failed: remove the segments of peers that can no longer do it themselves."""
    for names in exchange.peek("arena").values():
        for name in names.values():
            extension().unlink_name(name)


def size_mismatch(exchange: Exchange, rank: int, got: int, expected: int) -> errors.ShapeMismatchError:
    return errors.ShapeMismatchError(
        f"ranks {exchange.rank} and {rank} brought different sizes to one call",
        ranks=(rank,),
        where=f"{exchange.op} at site '{exchange.site}', group '{exchange.group}'",
        got=f"rank {rank}: {got} bytes of landing area",
        expected=f"rank {exchange.rank}: {expected} bytes",
        fix="give all ranks of a group the same shapes and dtypes, or disable the site",
    )


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
