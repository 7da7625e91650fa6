"""All-to-all exchanges of small JSON texts between the ranks of a group, through its c10d Store, each with a deadline.

A deadline is given by a word, the one in the setting's name: "init" (peers may be compiling) or "step" (all ranks are in a
call). An error names the ranks that did not arrive. A rank that fails writes its error under "failed", so that its peers fail
at once, and name the rank at fault: this one, or that for which it has waited. The Store itself may fail or hang with the
process that hosts it, and c10d waits for it without a deadline. So every request to it runs on a daemon thread.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from .. import errors, settings
from .abort_signal import AbortSignal
from .daemon_thread import run_in_daemon_thread
from .origin import Origin
from .wait_limit import WaitLimit

T = TypeVar("T")
Deadline = Literal["init", "step"]
_FAIL_S = 1.0
"""Seconds that a rank which has failed waits for the Store to take that."""


def deadline_seconds(deadline: Deadline) -> float:
    """Return the current setting of a deadline."""
    now = settings.current()
    return now.init_timeout_s if deadline == "init" else now.step_timeout_s


class Exchange:
    """Exchanges between the ranks of a group, each under a topic that is used once.

    `op`, `site`: the call that needs them, for errors. `abort`: ends waits when the group is aborted. `origin`: the group
    that the user named, whose ranks errors name.
    """

    def __init__(
        self,
        store: Any,
        group: str,
        device: str,
        rank: int,
        ranks: int,
        op: str,
        site: str,
        abort: AbortSignal | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.store, self.group, self.device, self.rank, self.ranks = store, group, device, rank, ranks
        self.op, self.site = op, site
        self.abort = abort or AbortSignal(group)
        self.origin = self.abort.origin = origin or Origin(group, group, tuple(range(ranks)))
        self._store_hangs = False  # the Store did not answer: another request may never return
        # One Store may serve several sessions of a group name in turn. All ranks count the same number of them.
        number = self._request(lambda _: store.add(f"ub_overlap/{device}/sessions/{rank}", 1), deadline_seconds("init"), {})
        self._prefix = f"ub_overlap/{device}/{number}"

    @property
    def prefix(self) -> str:
        """The prefix of its keys, which no other exchange of its Store has."""
        return self._prefix

    @property
    def numbers(self) -> tuple[int, ...]:
        """By rank, its number in the group that the user named."""
        return self.origin.ranks

    @property
    def origin_key(self) -> str:
        """A key of the group that the user named, for its sessions on one device type."""
        return f"{self.origin.key}/{self.device}"

    @property
    def number(self) -> int:
        """The number of this rank in the group that the user named."""
        return self.numbers[self.rank]

    @property
    def is_part(self) -> bool:
        """Whether the group is one of ours, made from the one that the user named."""
        return self.origin.is_part

    @property
    def label(self) -> str:
        """The group, for errors."""
        return self.origin.label

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{rank}"

    def fail(self, text: str) -> None:
        """Tell the peers that wait for this rank that it has failed. Wait at most a second for the Store."""
        self._tell({"rank": self.number, "text": text}, [self._key("failed", self.rank)])

    def fail_with(self, error: BaseException) -> None:
        """Tell the peers that this rank has failed with `error`, and whose fault that is.

        Those that do not wait for this rank learn of a rank that is gone or late, and of an abort. Of other errors they do
        not: they may find the same one by themselves, with more to say.
        """
        is_for_all = isinstance(error, (errors.PeerTimeoutError, errors.PeerFailedError, errors.GroupAbortedError))
        own = self._key("failed", self.rank)
        self._tell(errors.to_peers(error, self.number), [own, self._any_failure] if is_for_all else [own])

    def tell_of_other_group(self, error: errors.RankError) -> None:
        """Tell the peers that another group of the same origin has failed, also those that wait for other ranks."""
        report = {**errors.to_peers(error, -1), "rank": self.number}
        self._tell(report, [self._key("failed", self.rank), self._any_failure])

    def find_failure_of_other_group(self) -> errors.RankError | None:
        """Return the error of which `tell_of_other_group` has told, None without one. Wait at most a second for the Store."""
        with contextlib.suppress(TimeoutError, RuntimeError):
            report = None if self._store_hangs else self._run(lambda _: self.read_key(self._any_failure), _FAIL_S)
            if report and report.get("ranks"):
                return errors.from_peers(report, self.number, self.op, self.site)
        return None

    @property
    def _any_failure(self) -> str:
        return f"{self._prefix}/failed/any"

    def _tell(self, told: dict[str, Any], keys: Sequence[str]) -> None:
        def write() -> None:
            for key in keys:
                self.store.set(key, json.dumps(told))

        if not self._store_hangs:
            with contextlib.suppress(Exception):
                run_in_daemon_thread("ub_overlap-store", write).result(_FAIL_S)

    def find_silent_ranks(self, seconds: float) -> tuple[int, ...]:
        """Return the other ranks that have not called `fail` within `seconds`; none where the Store does not answer."""
        silent = [rank for rank in range(self.ranks) if rank != self.rank]

        def body(cancelled: threading.Event) -> None:
            limit = WaitLimit(seconds)
            while silent and not cancelled.is_set() and not limit.is_over():
                silent[:] = [rank for rank in silent if not self.store.check([self._key("failed", rank)])]
                cancelled.wait(0.02)

        with contextlib.suppress(TimeoutError, RuntimeError):
            if not self._store_hangs:
                self._run(body, 1.25 * seconds)
                return tuple(self.numbers[rank] for rank in silent)
        return ()

    def read_key(self, key: str) -> dict[str, Any] | None:
        """Return the value of any `key` of the group's Store, None where it is not there now. Do not wait."""
        with contextlib.suppress(Exception):
            if not self._store_hangs and self.store.check([key]):
                return dict(json.loads(self.store.get(key)))
        return None

    def gather(
        self, topic: str, own: dict[str, Any], deadline: Deadline, doing: str, check: Callable[[], None] | None = None
    ) -> list[dict[str, Any]]:
        """Return every rank's text, in rank order.

        `doing`: completes "... did not arrive at ...". `check`: called while waiting; it may raise.
        """
        texts = self.gather_from(range(self.ranks), topic, own, deadline, doing, check)
        return [texts[rank] for rank in range(self.ranks)]

    def gather_from(
        self,
        ranks: Iterable[int],
        topic: str,
        own: dict[str, Any] | None,
        deadline: Deadline,
        doing: str,
        check: Callable[[], None] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Return the texts of `ranks` and of this rank: long texts go only to the ranks that need them.

        `own`: None where no rank reads this rank's text, which is then not written to the Store.
        """
        texts: dict[int, dict[str, Any]] = {self.rank: own or {}}
        sources = sorted({*ranks, self.rank})

        def body(cancelled: threading.Event) -> None:
            self._collect(topic, own, sources, texts, deadline, doing, check, cancelled)

        self._request(body, deadline_seconds(deadline), texts, check)
        return texts

    def _request(
        self,
        body: Callable[[threading.Event], T],
        timeout_s: float,
        texts: dict[int, Any],
        check: Callable[[], None] | None = None,
    ) -> T:
        """Run `body`, which talks to the Store, and turn failures of the Store into PeerTimeoutError.

        `texts`: those received so far, by rank; the error names the other ranks.
        """
        try:
            return self._run(body, 1.25 * timeout_s)  # `body` has its own deadline while the Store answers
        except errors.UbOverlapError:
            raise
        except TimeoutError:
            self._store_hangs = True
            what = f"the Store of group '{self.group}' did not answer within {1.25 * timeout_s:g} s"
        except RuntimeError as failure:  # base class of c10d's errors
            self._store_hangs = True
            what = f"the Store of group '{self.group}' failed: {str(failure).splitlines()[0]}"
        with contextlib.suppress(errors.PeerFailedError):  # a peer that reports the same Store failure
            if check:
                check()  # names the peer whose process hosted the Store, where that is visible
        missing = [self.numbers[rank] for rank in range(self.ranks) if rank not in texts and rank != self.rank]
        fix = "look at the process that hosts the Store: rank 0 of the world, or the launcher"
        raise self._timeout_error(what, missing, "store", f"nothing from {errors.ranks_text(missing)}", fix)

    def _run(self, body: Callable[[threading.Event], T], timeout_s: float) -> T:
        """Run `body` and return its result or raise its exception. TimeoutError after `timeout_s`.

        `body` runs on a daemon thread, because it may block forever. Its argument is set once the caller no longer waits.
        """
        cancelled = threading.Event()
        outcome = run_in_daemon_thread("ub_overlap-store", lambda: body(cancelled))
        try:
            return self.abort.result(outcome, timeout_s, self._where())
        finally:
            cancelled.set()

    def _where(self) -> str:
        size = "" if self.is_part else f" of {self.ranks} ranks"
        return f"{self.op} at site '{self.site}', {self.label}{size}"

    def gone_error(self, rank: int, topic: str) -> errors.PeerTimeoutError:
        """Return the error for a rank whose process ended before it arrived at `topic`."""
        number = self.numbers[rank]
        late = errors.ranks_text([number])
        what = f"{late} of the group is gone: its process ended while the group was set up"
        fix = f"look at the log of {late}"
        return self._timeout_error(what, [number], topic, f"nothing from {late}", fix, is_gone=True)

    def _timeout_error(
        self, what: str, missing: Sequence[int], phase: str, got: str, fix: str, is_gone: bool = False, waited_s: float = 0.0
    ) -> errors.PeerTimeoutError:
        return errors.PeerTimeoutError(
            what,
            ranks=missing,
            op=self.op,
            site=self.site,
            phase=phase,
            reporter=self.number,
            where=f"{self._where()}; noticed by rank {self.number}",
            got=got,
            expected=f"{self.ranks} ranks",
            fix=fix,
            is_gone=is_gone,
            waited_s=waited_s,
        )

    def _collect(
        self,
        topic: str,
        own: dict[str, Any] | None,
        sources: Sequence[int],
        texts: dict[int, dict[str, Any]],
        deadline: Deadline,
        doing: str,
        check: Callable[[], None] | None,
        cancelled: threading.Event,
    ) -> None:
        """Write this rank's text, then poll for the others until all of `sources` are in `texts`."""
        if own is not None:
            self.store.set(self._key(topic, self.rank), json.dumps(own))
        timeout_s, pause = deadline_seconds(deadline), 0.0005
        end = WaitLimit(timeout_s)
        failure: Exception | None = None
        while not cancelled.is_set():
            for rank in sources:
                if rank not in texts and self.store.check([self._key(topic, rank)]):
                    texts[rank] = json.loads(self.store.get(self._key(topic, rank)))
            missing = [rank for rank in sources if rank not in texts]
            if not missing:
                return
            if failure:
                raise failure
            failure = self._find_failure(missing, check)
            if failure:
                continue  # a text that the peer wrote before it failed counts first: poll once more
            if end.is_over():
                numbers = [self.numbers[rank] for rank in missing]
                late, arrived = errors.ranks_text(numbers), errors.ranks_text([self.numbers[rank] for rank in sorted(texts)])
                what = f"{late} of the group did not arrive at {doing} within {timeout_s:g} s"
                fix = f"look at the log and the stack of {late}; if it is only slow, {settings.advise(f'{deadline}_timeout_s')}"
                raise self._timeout_error(what, numbers, topic, arrived, fix, waited_s=timeout_s)
            cancelled.wait(pause)
            pause = min(pause * 1.5, 0.02)

    def _find_failure(self, missing: Sequence[int], check: Callable[[], None] | None) -> Exception | None:
        """Return the error of `check`, of a missing rank that wrote one, or of any rank that knows of one, else None."""
        try:
            if check:
                check()
        except errors.UbOverlapError as error:
            return error
        for key in (*(self._key("failed", rank) for rank in missing), self._any_failure):
            if self.store.check([key]):
                return errors.from_peers(json.loads(self.store.get(key)), self.number, self.op, self.site)
        return None
