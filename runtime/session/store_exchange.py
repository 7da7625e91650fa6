"""Exchanges of texts between the ranks of a group, through its c10d Store, each with a deadline.

Deadlines are told by a word, as errors name the setting: "init" (peers may be compiling) or "step" (all ranks are in a call).
A rank that does not come is named, whatever the step. A rank that fails says so under "failed", so that the others fail at
once, and with its text. The Store itself may fail or fall silent with the process that hosts it; c10d waits for it without a
deadline, so it is asked on a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from .. import errors, settings
from .daemon_thread import apart

T = TypeVar("T")
Deadline = Literal["init", "step"]


def seconds(deadline: Deadline) -> float:
    """What is in force."""
    now = settings.current()
    return now.init_timeout_s if deadline == "init" else now.step_timeout_s


def _within(timeout_s: float, body: Callable[[threading.Event], T]) -> T:
    """What `body` returns or raises, or TimeoutError. It runs on a daemon thread, for it may block for ever; the event that it
    is given is set once nobody waits for it any more."""
    over = threading.Event()
    outcome = apart("ub_overlap-store", lambda: body(over))
    try:
        return outcome.result(timeout_s)
    finally:
        over.set()


class Exchange:
    """Exchanges of texts between the ranks of a group, each under a topic that is used once.

    `op`, `site`: the call that needs them, for errors.
    """

    def __init__(self, store: Any, group: str, device: str, rank: int, ranks: int, op: str, site: str) -> None:
        self.store, self.group, self.rank, self.ranks = store, group, rank, ranks
        self.op, self.site = op, site
        self._silent = False  # the Store has not answered: whoever asks it again may never return
        # The same store may serve several lives of a group name: count them. All ranks live through the same ones.
        life = self._ask(lambda _: store.add(f"ub_overlap/{device}/lives/{rank}", 1), seconds("init"), {})
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

    def look(self, key: str) -> dict[str, Any] | None:
        """What lies under `key` of the group's Store by now, whoever put it there; without waiting."""
        with contextlib.suppress(Exception):
            if not self._silent and self.store.check([key]):
                return dict(json.loads(self.store.get(key)))
        return None

    def all(
        self, topic: str, mine: dict[str, Any], deadline: Deadline, doing: str, check: Callable[[], None] | None = None
    ) -> list[dict[str, Any]]:
        """Every rank's text, in rank order. `doing` completes "... did not come to ..."; `check` may raise while we wait."""
        found = self.some(topic, mine, range(self.ranks), deadline, doing, check)
        return [found[rank] for rank in range(self.ranks)]

    def some(
        self,
        topic: str,
        mine: dict[str, Any] | None,
        ranks: Iterable[int],
        deadline: Deadline,
        doing: str,
        check: Callable[[], None] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """The texts of `ranks` alone, by rank: what is long travels only to those who need it. `mine`: None where no rank asks
        for this one's, which then leaves nothing in the Store."""
        found: dict[int, dict[str, Any]] = {self.rank: mine or {}}
        wanted = sorted({*ranks, self.rank})

        def body(over: threading.Event) -> None:
            self._collect(topic, mine, wanted, found, deadline, doing, check, over)

        self._ask(body, seconds(deadline), found, check)
        return found

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
        return errors.PeerTimeoutError(
            what,
            ranks=missing,
            op=self.op,
            site=self.site,
            phase=phase,
            reporter=self.rank,
            where=f"{self.op} at site '{self.site}', group '{self.group}' of {self.ranks} ranks; noticed by rank {self.rank}",
            got=got,
            expected=f"{self.ranks} ranks",
            fix=fix,
        )

    def _collect(
        self,
        topic: str,
        mine: dict[str, Any] | None,
        wanted: Sequence[int],
        found: dict[int, dict[str, Any]],
        deadline: Deadline,
        doing: str,
        check: Callable[[], None] | None,
        over: threading.Event,
    ) -> None:
        if mine is not None:
            self.store.set(self._key(topic, self.rank), json.dumps(mine))
        timeout_s, pause = seconds(deadline), 0.0005
        end = time.monotonic() + timeout_s
        stopped: Exception | None = None
        while not over.is_set():
            for rank in wanted:
                if rank not in found and self.store.check([self._key(topic, rank)]):
                    found[rank] = json.loads(self.store.get(self._key(topic, rank)))
            missing = [rank for rank in wanted if rank not in found]
            if not missing:
                return
            if stopped:
                raise stopped
            stopped = self._stopped(missing, check)
            if stopped:
                continue  # what a peer said before it gave up counts first: look once more
            if time.monotonic() > end:
                who = errors.ranks_text(missing)
                what = f"{who} of the group did not come to {doing} within {timeout_s:g} s"
                setting = f"UB_OVERLAP_{deadline.upper()}_TIMEOUT_S"
                fix = f"look at the log and the stack of {who}; if it is only slow, raise {setting}"
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
