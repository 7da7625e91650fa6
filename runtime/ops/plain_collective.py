"""Run the plain c10d collective of a site, and name site and rank where it fails.

A group without transport, and a site whose strategy is "none", run plain collectives. Their waits end at the deadline of the
process group, and c10d's error names neither the site nor a rank. Where the group has an arena, a peer whose process is gone
is named.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from ub_overlap import _torch_compat

from .. import errors
from ..session.bind import find_session


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
