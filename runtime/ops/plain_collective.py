"""Run the plain c10d collective of a site, and name site and rank where it fails.

A group without transport, and a site whose strategy is "none", run plain collectives. Their waits end at the deadline of the
process group, and c10d's error names neither the site nor a rank. Where the group has an arena, a peer whose process is gone
is named. gloo can miss that a peer has closed its connection, so waits on the CPU look for such peers themselves.

The wait of a split collective also ends at the deadline of a step, on the CPU. Ranks that fail there report it in the Store.
So the ranks that do not report it are named: they have not come so far, or they are gone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from ub_overlap import _torch_compat

from .. import errors, settings
from ..session import host_groups
from ..session.bind import find_session
from ..session.session import Session
from ..session.wait_limit import WaitLimit

_POLL_S = 0.05
_REPORT_S = 5.0
"""Seconds that the ranks have to report a failure, at most the deadline of a step."""
_LOOK_S = 1.0
"""Seconds between looks for a failure of another group of the same origin."""
_GRACE_S = 10.0
"""Seconds that a collective may go on after a peer of it is lost, at most the deadline of a step: others may be slow."""


class _Current(threading.local):
    """The op of this thread whose fallback runs."""

    op = site = ""


_current = _Current()


@contextlib.contextmanager
def at_site(op: str, site: str) -> Iterator[None]:
    """Name the collectives that run within."""
    before = _current.op, _current.site
    _current.op, _current.site = op, site
    try:
        yield
    finally:
        _current.op, _current.site = before


def fail_plain(op: str, site: str, group: str, device: str, text: str) -> None:
    """Raise the error of a split collective that c10d failed to launch, or to end on a GPU. C++ calls this.

    PeerTimeoutError for a peer that is gone, else CollectiveError.
    """
    with at_site(op, site), _name_failures(group, device):
        raise RuntimeError(text)


def run_collective(group: str, device: str, start: Callable[[], Any]) -> None:
    """Start a collective of `group` and wait for it, where it fails with an error of ours.

    PeerTimeoutError for a peer that is gone, else CollectiveError. GroupAbortedError.
    """
    with _name_failures(group, device):
        work = start()
        if device == "cuda":
            work.wait()
        else:
            _wait_on_host(work, group, device)


def wait_on_host(work: Any, op: str, site: str, group: str) -> None:
    """Wait for a split collective on the CPU, with the deadline of a step. C++ calls this.

    PeerTimeoutError names the ranks that do not report a failure, CollectiveError where all do. GroupAbortedError.
    """
    with at_site(op, site):
        session = find_session(group, "cpu")
        assert session is not None
        try:
            _wait_for_peers(work, session)
        except errors.RankError as error:
            session.tell_origin_group(error)
            raise


def _wait_for_peers(work: Any, session: Session) -> None:
    group, device = session.group, str(session.core.device)
    step_s = settings.current().step_timeout_s
    limit, where, look_for_failure = WaitLimit(step_s), _where(session.label), WaitLimit(_LOOK_S)
    cause: RuntimeError | None = None
    while True:
        session.abort.check(where)
        session.show_wait()
        try:
            if _ends_soon(work):
                return
        except RuntimeError as failure:
            what, got, cause = "a collective failed", str(failure).partition("\n")[0], failure
            break
        if limit.is_over():
            what, got = f"a collective did not end within {step_s:g} s", "no result"
            break
        if look_for_failure.is_over():
            _raise_failure_of_other_group(session)
            look_for_failure = WaitLimit(_LOOK_S)
    ranks = session.find_silent_ranks(_current.op, _current.site, f"{what}: {got}", min(_REPORT_S, step_s))
    _raise_failure_of_other_group(session)
    if not ranks:
        raise _collective_error(group, device, f"{what}: {got}") from cause
    late = errors.ranks_text(ranks)
    raise errors.PeerTimeoutError(
        f"{what}; {late} of the group did not report that: gone, or not yet there",
        ranks=ranks,
        op=_current.op,
        site=_current.site,
        phase="c10d",
        reporter=session.number,
        where=f"{where}; noticed by rank {session.number}",
        got=got,
        expected="all ranks start and finish the collective",
        fix=f"look at the log and the stack of {late}; if it is only slow, {settings.advise('step_timeout_s')}",
    ) from cause


def _raise_failure_of_other_group(session: Session) -> None:
    """Raise the failure of another group of the same origin. A peer that has told of it does not come here."""
    if error := session.find_failure_of_other_group(_current.op, _current.site):
        raise error


@contextlib.contextmanager
def _name_failures(group: str, device: str) -> Iterator[None]:
    """Raise c10d's errors as PeerTimeoutError or CollectiveError."""
    try:
        yield
    except (errors.UbOverlapError, torch.OutOfMemoryError):
        raise
    except RuntimeError as failure:  # base class of c10d's errors; gloo raises it itself
        session = find_session(group, device)
        if session is not None:
            session.fail_collective(_current.op, _current.site, str(failure))
        error = _collective_error(group, device, str(failure))
        if session is not None:
            session.tell_origin_group(error)
        raise error from failure


def _wait_on_host(work: Any, group: str, device: str) -> None:
    """Wait until a collective ends, or `_GRACE_S` after a peer of the group has failed or its process is gone.

    A peer may end as soon as it has its own result, so the collective gets that time to end here too.
    """
    session: Session | None = None
    limit: WaitLimit | None = None
    while not _ends_soon(work):
        session = session or find_session(group, device)
        if session is None:
            continue
        session.abort.check(_where(session.label))
        if limit is None and session.has_lost_peer():
            limit = WaitLimit(min(_GRACE_S, settings.current().step_timeout_s))
        if limit is not None and limit.is_over():
            raise RuntimeError("a peer failed or its process is gone, and the collective did not end")


def _ends_soon(work: Any) -> bool:
    """Wait for a collective in flight, at most `_POLL_S`, and return whether it ended. Raise its error where it failed."""
    try:
        work.wait(timedelta(seconds=_POLL_S))
    except RuntimeError:  # also for the end of that time
        if not work.is_completed():
            return False
        work.wait()
    return True


def _collective_error(group: str, device: str, text: str) -> errors.CollectiveError:
    process_group = _torch_compat.group_of(group)
    origin = host_groups.origin_of(process_group)
    deadline = _torch_compat.timeout_of(process_group, device)
    within = "" if deadline is None else f" within the deadline of the process group, {deadline:g} s"
    return errors.CollectiveError(
        f"the plain collective of a site failed on rank {origin.ranks[process_group.rank()]} of the group",
        where=_where(origin.label) + ("" if origin.is_part else f" of {process_group.size()} ranks"),
        got=text.splitlines()[0] if text else "no text",
        expected=f"all ranks run it{within}",
        fix="look at ranks that stopped before this site, or that do not report this error; "
        "init_process_group(timeout=...) and new_group(timeout=...) set the deadline",
    )


def _where(label: str) -> str:
    return f"{_current.op} at site '{_current.site}', {label}"
