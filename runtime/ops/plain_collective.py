"""Run the plain c10d collective of a site, and name site and rank where it fails.

A group without transport, and a site whose strategy is "none", run plain collectives. Their waits end at the deadline of the
process group, and c10d's error names neither the site nor a rank. Where the group has an arena, a peer whose process is gone
is named.

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
from ..session.bind import find_session
from ..session.wait_limit import WaitLimit

_POLL_S = 0.05
_REPORT_S = 5.0
"""Seconds that the ranks have to report a failure, at most the deadline of a step."""


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


def run_collective(group: str, device: str, run: Callable[[], object]) -> None:
    """Run a collective of `group`. CollectiveError, or PeerTimeoutError for a peer that is gone, where it fails."""
    try:
        run()
    except (errors.UbOverlapError, torch.OutOfMemoryError):
        raise
    except RuntimeError as failure:  # base class of c10d's errors; gloo raises it itself
        session = find_session(group, device)
        if session is not None:
            session.fail_collective(_current.op, _current.site, str(failure))
        raise _collective_error(group, device, str(failure)) from failure


def wait_for(work: Any, group: str, device: str) -> None:
    """Wait for a collective in flight: on a GPU the current stream waits, elsewhere the host, with the deadline of a step.

    A GPU's wait ends at the deadline of the process group. PeerTimeoutError names the ranks that do not report a failure,
    CollectiveError where all do. GroupAbortedError.
    """
    if device == "cuda":
        run_collective(group, device, work.wait)
        return
    session = find_session(group, device)
    assert session is not None
    step_s = settings.current().step_timeout_s
    limit, where = WaitLimit(step_s), f"{_current.op} at site '{_current.site}', group '{group}'"
    while True:
        session.abort.check(where)
        try:
            work.wait(timedelta(seconds=_POLL_S))
            return
        except RuntimeError as failure:
            if not work.is_completed():
                if not limit.is_over():
                    continue
                what, got = f"a collective did not end within {step_s:g} s", "no result"
            elif (own := _failure_of(work)) is None:
                return
            else:
                what, got = "a collective failed", own
            ranks = session.find_silent_ranks(_current.op, _current.site, f"{what}: {got}", min(_REPORT_S, step_s))
            if not ranks:
                raise _collective_error(group, device, f"{what}: {got}") from failure
            late = errors.ranks_text(ranks)
            raise errors.PeerTimeoutError(
                f"{what}; {late} of the group did not report that: gone, or not yet there",
                ranks=ranks,
                op=_current.op,
                site=_current.site,
                phase="c10d",
                reporter=session.core.rank,
                where=f"{where}; noticed by rank {session.core.rank}",
                got=got,
                expected="all ranks start and finish the collective",
                fix=f"look at the log and the stack of {late}; if it is only slow, {settings.advise('step_timeout_s')}",
            ) from failure


def _failure_of(work: Any) -> str | None:
    """Return the first line of the error of a completed collective, None where it succeeded."""
    try:
        work.wait()
    except RuntimeError as failure:
        return str(failure).partition("\n")[0]
    return None


def _collective_error(group: str, device: str, text: str) -> errors.CollectiveError:
    process_group = _torch_compat.group_of(group)
    deadline = _torch_compat.timeout_of(process_group, device)
    within = "" if deadline is None else f" within the deadline of the process group, {deadline:g} s"
    return errors.CollectiveError(
        f"the plain collective of a site failed on rank {process_group.rank()} of the group",
        where=f"{_current.op} at site '{_current.site}', group '{group}' of {process_group.size()} ranks",
        got=text.splitlines()[0] if text else "no text",
        expected=f"all ranks run it{within}",
        fix="look at ranks that stopped before this site, or that do not report this error; "
        "init_process_group(timeout=...) and new_group(timeout=...) set the deadline",
    )
