"""The session of a process group on one device type: plan checks, arena growth and tuning, all in step on all ranks.

C++ makes a session at the group's first call (bind.py) and runs calls with its `core`. All agreement between ranks goes
through all-to-all exchanges with deadlines (store_exchange.py), so an error names the rank that is missing:

    bind.py            one session: hosts, builds, links, memory
    plan/N             digest of the N-th plan -> must be equal; else text/N sends plans and graphs, and PlanMismatchError
                       names the first site and node that differ. `initialize` uses it with a requested slot size
    channels/...       channels.py: sizes and memory for messages between two ranks
    tune/N, tuned/N    autotune.py: measurements that ranks have of a site's alternatives, then the times taken
    areas/N            bytes that a site's first all_to_all needs on each rank -> the slot grows to the largest
    abandoned/N        a split collective that has no finish, as after an exception -> must be equal
    grow/N             address of the larger segment -> attach; grown/N: all ranks have moved, the old one is released
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import errors
from ..autotune import Tuner
from ..extension import extension
from ..schedule.steps import FUSED_SLOT, SLOTS
from . import channels, origin_sessions, spared_multiprocessors
from .abort_signal import AbortSignal
from .arena_size import round_slot_bytes
from .plan_check import check_group_size, check_plans
from .site_mismatch import make_error
from .store_exchange import Exchange

log = logging.getLogger(__name__)


class Session:
    """One group on one device type. C++ runs calls with `core`, and calls `verify`, `grow` and `tune`."""

    def __init__(self, core: Any, exchange: Exchange | None, arena: Any) -> None:
        self.core = core
        self._exchange, self._arena = exchange, arena
        self.abort = AbortSignal(core.group) if exchange is None else exchange.abort
        """Ends waits when the group is aborted. Lives as long as the session."""
        self._checked_plans = self._growths = self._reservations = self._area_exchanges = self._abandoned = 0
        self._reserved = ("", 0)
        self.message_bytes = 0
        """Bytes of a message that a channel between neighbours holds; 0 without channels."""
        # Without an arena every alternative runs as the same plain c10d collective: nothing to agree on.
        if exchange is not None:
            origin_sessions.add(self, exchange)
        self._tuner = Tuner(exchange if arena is not None else None, str(core.device))

    @property
    def group(self) -> str:
        """c10d name of the group."""
        return str(self.core.group)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a call's landing area without growth; 0 without an arena (one rank, or plain c10d)."""
        return 0 if self._arena is None else int(self._arena.slot_bytes)

    @property
    def arena_bytes(self) -> int:
        """Bytes of all slots of this rank."""
        if self._arena is None:
            return 0
        further = range(SLOTS, FUSED_SLOT + 1)
        return SLOTS * self.slot_bytes + sum(int(self._arena.bytes_of_slot(slot)) for slot in further)

    @property
    def growths(self) -> int:
        """Number of arena growths."""
        return self._growths

    @property
    def arena_core(self) -> Any:
        """The C++ arena; None without one."""
        return getattr(self._arena, "core", self._arena)

    @property
    def label(self) -> str:
        """The group, for errors."""
        return f"group '{self.group}'" if self._exchange is None else self._exchange.label

    @property
    def number(self) -> int:
        """The number of this rank in the group that the user named."""
        return int(self.core.rank) if self._exchange is None else self._exchange.number

    def tell_plain_groups(self, error: errors.RankError) -> None:
        """Tell the groups of the same origin that have no arena of the failure of this one. C++ has told the others."""
        if self._exchange is not None:
            origin_sessions.tell(self._exchange, error, plain_only=True)

    def tell_origin_group(self, error: errors.RankError) -> None:
        """Tell the other groups of the origin that this one has failed, where it is a part of it."""
        if self._exchange is not None and self._exchange.is_part:
            origin_sessions.tell(self._exchange, error)

    def show_wait(self) -> None:
        """Show the ranks that wait for this one in other groups of the same origin that it waits here."""
        if self._exchange is not None and self._exchange.is_part:
            extension().show_wait(self._exchange.origin_key)

    def find_failure_of_other_group(self, op: str, site: str) -> errors.RankError | None:
        """Return the failure of another group of the same origin, of which a peer of this one has told; None without one."""
        exchange = self._exchange
        if exchange is None or not exchange.is_part:
            return None
        exchange.op, exchange.site = op, site
        return exchange.find_failure_of_other_group()

    def reserve(self, slot_bytes: int) -> str:
        """Return a digest whose next call grows the slots to `slot_bytes`.

        `verify` sees the digest within that call. So all ranks are in step, and no other call of this group is in flight.
        """
        self._reservations += 1
        self._reserved = (f"initialize.{self._reservations}", slot_bytes)
        return self._reserved[0]

    def pending_error(self) -> errors.UbOverlapError | None:
        """Return the error of a failed call without consuming it: the next op on the group and `check` still raise it."""
        try:
            if self._arena is not None:
                memory = self.arena_core
                memory.watch()  # a device does not see that a peer's process is gone
                extension().Arena.check(memory)
        except errors.UbOverlapError as error:
            return error.with_traceback(None)  # a traceback would keep this session's memory
        return None

    def verify(self, digest: str, op: str, site: str) -> None:
        """Check that all ranks run the plan `digest`, and that it was made for a group of this size.

        PlanMismatchError names the ranks with another plan, and the difference.
        """
        exchange = self._exchange
        if exchange is None:
            return
        exchange.op, exchange.site = op, site
        self._checked_plans += 1
        requested = self._reserved[1] if digest == self._reserved[0] else 0
        try:
            check_group_size(self.group, exchange.ranks, site)
            largest = check_plans(exchange, self._checked_plans, digest, requested, self._check_peers)
            if self._arena is not None and largest > self._arena.slot_bytes:
                self.grow(largest, op, site)
        except BaseException as error:  # also Ctrl-C: without an arena the peers have no other way to learn of it
            exchange.fail_with(error)
            if isinstance(error, errors.RankError):
                self.tell_origin_group(error)
            raise

    def grow(self, needed: int, op: str, site: str, slot: int = 0) -> None:
        """Grow slots to hold `needed` bytes, in step: all ranks see the same sizes at the same call.

        `slot`: a split slot grows alone, at a start, when no collective is open in it. The slots of fused collectives are one
        memory, known by the first of them. The others grow together.
        """
        exchange, arena = self._exchange, self._arena
        if exchange is None or arena is None:
            raise AssertionError("a session without an arena cannot grow")
        exchange.op, exchange.site = op, site
        self._growths += 1
        before, size = arena.bytes_of_slot(slot), round_slot_bytes(needed)
        doing = f"a call that needs {needed} bytes of landing area"
        try:
            arena.grow_begin(size, slot)
            own = {"op": op, "site": site, "address": arena.data_address, "size": size, "needed": needed}
            segments = exchange.gather(f"grow/{self._growths}", own, "step", doing, lambda: self._check_call(slot))
            _check_calls(exchange, segments)
            for rank, segment in enumerate(segments):
                if segment["needed"] != needed:
                    raise _size_mismatch(exchange, rank, segment["needed"], needed)
            for rank, segment in enumerate(segments):  # only once all agree: a rank that does not frees its own
                if rank != exchange.rank:
                    self._attach_grown(rank, segment["address"])
            exchange.gather(f"grown/{self._growths}", {}, "step", doing, self._check_peers)
        except BaseException:
            arena.grow_abort()  # the error may live long
            raise
        finally:
            arena.stop_sharing()
        arena.grow_commit()
        log.info(
            "group '%s': landing area%s grew from %d to %d bytes per slot (%d of arena), for %s at site '%s'",
            exchange.group, _name_of_slot(slot), before, size, self.arena_bytes, op, site,
        )  # fmt: skip

    def grow_to_largest(self, needed: int, op: str, site: str, slot: int) -> None:
        """Grow the areas of all_to_alls in a split slot to what any rank needs: a rank knows only its own pieces.

        While a CUDA graph is captured they stay as they are, on all ranks: larger pieces travel in rounds.
        """
        exchange, arena = self._exchange, self._arena
        if exchange is None or arena is None:
            raise AssertionError("a session without an arena cannot grow")
        exchange.op, exchange.site = op, site
        if exchange.device == "cuda" and arena.bytes_of_slot(slot) and arena.is_capturing():
            return
        self._area_exchanges += 1
        doing = f"a site's first all_to_all, whose areas need {needed} bytes here"
        own = {"op": op, "site": site, "needed": needed}
        needs = exchange.gather(f"areas/{self._area_exchanges}", own, "step", doing, lambda: self._check_call(slot))
        _check_calls(exchange, needs)
        largest = max(int(need["needed"]) for need in needs)
        if largest > arena.bytes_of_slot(slot):
            self.grow(largest, op, site, slot)

    def agree_on_abandoned(self, op: str, site: str, slot: int) -> None:
        """Check that all ranks have abandoned this split collective, so that each may end it and use its slot again.

        A rank abandons one by an exception between start and finish. Ranks that have finished it are other calls ahead:
        SiteMismatchError, at the deadline, or at once if they have abandoned another one.
        """
        exchange = self._exchange
        if exchange is None:
            return
        exchange.op, exchange.site = op, site
        self._abandoned += 1
        own = {"op": op, "site": site, "slot": slot}
        try:
            try:
                doing = "the end of a collective that an exception has left open"
                records = exchange.gather(f"abandoned/{self._abandoned}", own, "step", doing, self._check_peers)
            except (errors.PeerTimeoutError, errors.PeerFailedError) as error:
                raise _not_abandoned(exchange, error) from error
            for rank, record in enumerate(records):
                if record != own:
                    raise _other_abandoned(exchange, rank, record, own)
        except BaseException as error:  # without an arena the peers have no other way to learn of it
            exchange.fail_with(error)
            raise
        text = "group '%s': %s at site '%s' was started and not finished, as after an exception; it ends now, on all ranks"
        log.warning(text, exchange.group, op, site)

    def share_channels(self, size: int, slots: int, far: int) -> channels.Channels:
        """Make the channels of the group, in step with all ranks, and give them to C++.

        `size`, `slots`: bytes and number of messages that a channel between neighbours is to hold. `far`: bytes of one between
        other ranks, at most.
        """
        exchange = self._exchange
        if exchange is None or self._arena is None:
            raise AssertionError("a session without an arena has no channels")
        try:
            made = channels.share(exchange, self._arena, size, slots, far, self._check_peers)
        except BaseException as error:  # also Ctrl-C: the peers need not wait for this rank
            exchange.fail_with(error)
            # A peer may have its channels by now. Another attempt would read this one's texts in the Store.
            extension().Arena.fail(self.arena_core, error, exchange.op, exchange.site)
            raise
        self.core.set_channels(made.core)
        self.message_bytes = made.message_bytes
        return made

    def fail_collective(self, op: str, site: str, text: str) -> None:
        """Tell the peers that a plain collective failed here. Raise PeerTimeoutError where the process of one is gone."""
        if self._exchange is not None:
            self._exchange.op, self._exchange.site = op, site
            self._exchange.fail(f"{op} at site '{site}': {text}")
            for _ in range(10 if self._arena is not None else 0):  # a process closes its sockets before it is gone
                self._check_peers()
                time.sleep(0.05)

    def most_spared_multiprocessors(self) -> int:
        """Return how many multiprocessors matmuls leave at most while c10d runs a split collective of the group."""
        return spared_multiprocessors.most_spared(self.group, str(self.core.device))

    def has_lost_peer(self) -> bool:
        """Return whether a peer of this group has failed, or its process is gone."""
        return self._arena is not None and bool(self._arena.has_lost_peer())

    def find_silent_ranks(self, op: str, site: str, text: str, seconds: float) -> tuple[int, ...]:
        """Report a failed collective to the peers. Return the ranks that report none within `seconds`."""
        exchange = self._exchange
        if exchange is None:
            return ()
        exchange.op, exchange.site = op, site
        exchange.fail(f"{op} at site '{site}': {text}")
        return exchange.find_silent_ranks(seconds)

    def _attach_grown(self, rank: int, address: str) -> None:
        try:
            self._arena.grow_attach(rank, address)
        except errors.ArenaError:
            self._check_peers()  # a rank that has died is the better error
            raise

    def tune(self, op: str, site: str, bucket: int, work: str, strategies: Sequence[str], run: Callable[[int], bool]) -> int:
        """Return the index of the strategy that all ranks use at a site, -1 where none can be timed now."""
        return self._tuner.tune(op, site, bucket, work, strategies, run, self._check_peers)

    def _check_call(self, slot: int) -> None:
        """Raise when a peer has failed, its process is gone, or its call in this slot is at another site than this rank's.

        Split collectives and all_to_alls publish their calls in the slot that grows. Other calls may be in another one.
        """
        self._check_peers()
        if self._arena is not None:
            self._arena.check_site(slot)

    def _check_peers(self) -> None:
        """Raise when a peer of this group has failed, or its process is gone."""
        if self._arena is not None and self._exchange is not None:
            self._arena.check(self._exchange.op, self._exchange.site)


def _name_of_slot(slot: int) -> str:
    if slot < SLOTS:
        return ""
    return f" of split slot {slot - SLOTS}" if slot < FUSED_SLOT else " of fused collectives"


def _check_calls(exchange: Exchange, records: Sequence[dict[str, Any]]) -> None:
    """Raise SiteMismatchError where the ranks exchanged sizes for different calls. `records`: the op and site of each rank's.

    The rank with fewer others at its call is the culprit. Compilations of one graph for other inputs have other sites: then it
    is a ShapeMismatchError.
    """
    calls = [(record["op"], record["site"]) for record in records]
    own = calls[exchange.rank]
    for rank, theirs in enumerate(calls):
        if theirs == own:
            continue
        sides = [(exchange.numbers[rank], theirs), (exchange.number, own)]
        (culprit, got), (reporter, expected) = sides[::-1] if calls.count(theirs) > calls.count(own) else sides
        raise make_error(
            "SiteMismatchError",
            {
                "ranks": str(culprit), "reporter": str(reporter), "op": exchange.op, "site": exchange.site,
                "got": "{} at site '{}'".format(*got), "expected": "{} at site '{}'".format(*expected),
            },
        )  # fmt: skip


def _size_mismatch(exchange: Exchange, rank: int, got: int, expected: int) -> errors.ShapeMismatchError:
    number = exchange.numbers[rank]
    return errors.ShapeMismatchError(
        f"ranks {exchange.number} and {number} have different sizes in one call",
        ranks=(number,),
        where=f"{exchange.op} at site '{exchange.site}', {exchange.label}",
        got=f"rank {number}: {got} bytes of landing area",
        expected=f"rank {exchange.number}: {expected} bytes",
        fix="give all ranks of a group the same shapes and dtypes, or disable the site",
    )


def _not_abandoned(exchange: Exchange, error: errors.RankError) -> errors.SiteMismatchError:
    """Return the error for a collective that this rank has abandoned alone. `error`: what ended its wait for the others."""
    others = [number for number in exchange.numbers if number != exchange.number]
    ranks = [number for number in error.ranks if number != exchange.number] or others
    return errors.SiteMismatchError(
        f"{exchange.op} was started and not finished on rank {exchange.number}, as after an exception, and not so on "
        f"{errors.ranks_text(ranks)}",
        ranks=ranks,
        where=f"{exchange.op} at site '{exchange.site}', {exchange.label}",
        got=str(error).partition("\n")[0],
        expected="an exception at the same place on all ranks, which then end the collective together",
        fix=f"look at the first exception of rank {exchange.number}; to go on after it, destroy the process group on all ranks "
        "and make it again",
    )


def _other_abandoned(exchange: Exchange, rank: int, theirs: dict[str, Any], own: dict[str, Any]) -> errors.SiteMismatchError:
    def name(record: dict[str, Any]) -> str:
        return f"{record['op']} at site '{record['site']}' in split slot {record['slot']}"

    number = exchange.numbers[rank]
    return errors.SiteMismatchError(
        f"ranks {exchange.number} and {number} have left other split collectives without a finish",
        ranks=(number,),
        where=f"{exchange.op} at site '{exchange.site}', {exchange.label}",
        got=f"rank {number}: {name(theirs)}",
        expected=f"rank {exchange.number}: {name(own)}",
        fix="look at the first exception of each rank: all ranks must leave a step at one place, or use a new group",
    )


def check(group: str | None = None) -> None:
    """Raise the pending error of `group`, or of any group.

    GPU calls are asynchronous: a failure is raised by the next op of the group, or here. Call it after
    torch.cuda.synchronize() to cover all calls.
    """
    for core in extension().sessions():
        if group is None or core.group == group:
            core.check()


def close(group: str | None = None, device: str = "cpu") -> None:
    """Close the session of `group`, or all sessions. Idempotent. The group can bind again only if all its ranks do."""
    if group is None:
        extension().close_all()
    else:
        extension().close(group, device)
