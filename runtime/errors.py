"""All errors of this library. A message says what went wrong, where, what was got and expected, and how to fix it.

C++ raises them too, through `make` with a class name and fields (csrc/bindings/errors.cpp). So all texts are in this file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


class UbOverlapError(RuntimeError):
    """Base class of all errors of this library.

    `what` went wrong, `where` (site, op, file), what was `got` and `expected`, and how to `fix` it. Unknown parts are "".
    """

    def __init__(self, what: str, *, where: str = "", got: str = "", expected: str = "", fix: str = "") -> None:
        self.what, self.where, self.got, self.expected, self.fix = what, where, got, expected, fix
        super().__init__(self.message())

    flight_record = ""
    """File with the last calls of every group of this process, "" where none was written."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n  flight:   {self.flight_record}" if self.flight_record else text

    def message(self) -> str:
        """Return the full text."""
        lines = [self.what]
        for label, text in (("where", self.where), ("got", self.got), ("expected", self.expected), ("fix", self.fix)):
            if text:
                lines.append(f"  {label + ':':<10}{text}")
        return "\n".join(lines)


class OptionError(UbOverlapError, ValueError):
    """An invalid setting, option or argument."""


class StoredFileError(OptionError):
    """A file that is missing, damaged, or of another kind. `where` is its name; `what` names the bad field."""

    @property
    def line(self) -> str:
        """The error in one line: "FILE: what, got ..., expected ..."."""
        parts = [f"{self.where}: {self.what}"]
        parts += [f"{label} {text}" for label, text in (("got", self.got), ("expected", self.expected)) if text]
        return ", ".join(" ".join(part.split()) for part in parts)


class RankError(UbOverlapError):
    """An error that names ranks of the group. `ranks`: the ranks that caused it, never the one that reports it."""

    def __init__(
        self, what: str, *, ranks: Sequence[int] = (), where: str = "", got: str = "", expected: str = "", fix: str = ""
    ) -> None:
        self.ranks = tuple(ranks)
        super().__init__(what, where=where, got=got, expected=expected, fix=fix)

    def is_caused_by_others(self, rank: int) -> bool:
        """Return whether the ranks at fault are others than `rank`, which has raised this error."""
        return bool(self.ranks) and rank not in self.ranks


class PlanMismatchError(RankError):
    """The ranks of a group compiled different plans. `ranks`: those whose plan differs from this rank's.

    Without ranks: a graph was compiled for a group of another size than the one that it runs on.

    `diff`: how the graph of the first of them differs from this rank's, "" where one of the graphs is not available.
    """

    def __init__(self, what: str, *, diff: str = "", **fields: Any) -> None:
        self.diff = diff
        super().__init__(what, **fields)

    def message(self) -> str:
        return super().message() + (f"\n{self.diff}" if self.diff else "")


class PeerTimeoutError(RankError):
    """Ranks of the group did not arrive before the deadline, or their processes are gone.

    `ranks`: their ranks in the group. `op`, `site`, `phase`, `chunk`: the wait that timed out. `expected_epoch` and
    `observed_epoch`: the call it belongs to and the last call seen. `reporter`: the rank that noticed. `is_gone`: the process
    has ended. `waited_s`: the deadline, 0 where none was reached.
    """

    def __init__(
        self,
        what: str,
        *,
        op: str = "",
        site: str = "",
        phase: str = "",
        chunk: int = -1,
        expected_epoch: int = 0,
        observed_epoch: int = 0,
        reporter: int = -1,
        is_gone: bool = False,
        waited_s: float = 0.0,
        **fields: Any,
    ) -> None:
        self.op, self.site, self.phase, self.chunk = op, site, phase, chunk
        self.is_gone, self.waited_s = is_gone, waited_s
        self.expected_epoch, self.observed_epoch, self.reporter = expected_epoch, observed_epoch, reporter
        super().__init__(what, **fields)


class DeviceTimeoutError(RankError):
    """Work on a rank's own device did not end before the deadline; no peer was late. `ranks`: that rank, where known.

    Either an earlier call of the group makes no progress and holds the group's lock on the device. Or the host waits for work
    on the device: calls that still use memory, or events whose times it reads.
    """


class ShapeMismatchError(RankError):
    """A peer has other sizes or dtypes at the same site. `ranks`: the peer."""


class SiteMismatchError(RankError):
    """A peer is at another site of the program. `ranks`: the peer."""


class PeerFailedError(RankError):
    """A peer raised an error and reported it to the group. `ranks`: the peer."""


class CollectiveError(RankError):
    """The plain collective of a site failed in c10d, or reached the deadline of its process group.

    c10d does not name the rank at fault: `ranks` is empty. The error's cause (`__cause__`) is c10d's own.
    """


class GroupAbortedError(UbOverlapError):
    """This process aborted the group with `ub_overlap.abort`. The waits of this rank ended; the group cannot be used any more.

    `got`: who aborted it, and why. The other ranks raise PeerFailedError.
    """


class SessionPoisonedError(UbOverlapError):
    """An earlier error left the ranks of this group out of step. The group cannot be used any more."""


class BuildMismatchError(UbOverlapError):
    """The compiled extension is missing, or was built for another torch or another version."""


class ArenaError(UbOverlapError):
    """Shared memory could not be allocated, grown or attached."""


class ForkError(UbOverlapError):
    """A forked child used a process group of its parent."""


class TransportError(UbOverlapError):
    """No transport can run this call on this device."""


class Fp8StateError(UbOverlapError, ValueError):
    """Amax histories of delayed scaling that do not fit the request."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _peer_timeout(fields: dict[str, str]) -> UbOverlapError:
    rank, waited, silent = int(fields["ranks"]), fields["waited_s"], float(fields["silent_s"])
    label = f"rank {rank} of the group"
    seen, awaited = int(fields["observed_epoch"]), int(fields["expected_epoch"])
    is_gone = fields["dead"] == "1"
    if is_gone:
        what = f"{label} is gone: its process ended during a call"
    else:
        what = f"{label} did not arrive within {waited} s"
        if silent > 1:
            what += f" (its process exists, without progress in the group for {silent:.1f} s: compiling, busy or stopped)"
    return PeerTimeoutError(
        what,
        ranks=(rank,),
        op=fields["op"],
        site=fields["site"],
        phase=fields["phase"],
        chunk=int(fields["chunk"]),
        expected_epoch=awaited,
        observed_epoch=seen,
        reporter=int(fields["reporter"]),
        is_gone=is_gone,
        waited_s=float(waited),
        where=f"{fields['op']} at site '{fields['site']}', phase {fields['phase']}, chunk {fields['chunk']}"
        f"{_group_text(fields)}; noticed by rank {fields['reporter']}",
        got="" if is_gone else _peer_state(fields, seen),
        expected="" if is_gone else fields["expected"] or f"epoch {awaited}",
        fix=f"look at the log of rank {rank}"
        if is_gone
        else f"look at the log and the stack of rank {rank}; if it is only slow, {fields['advice']}" + _queues_text(fields),
    )


def _hardware_queues() -> int:
    """Return how many hardware queues the environment gives the streams of a device; 8 by default."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(connections) if connections.isdecimal() else 8


def _queues_text(fields: dict[str, str]) -> str:
    """Return what may block a message that both ends have issued, for `fix`; "" for other waits."""
    if not (fields["expected"] and fields["got"]) or _hardware_queues() >= 32:
        return ""
    return (
        "; on a GPU a message may be queued behind an earlier receive where streams outnumber the hardware queues: set "
        "CUDA_DEVICE_MAX_CONNECTIONS=32 on all ranks"
    )


def _peer_state(fields: dict[str, str], seen: int) -> str:
    """Return what is known of a late peer. `expected` is set for messages, which have a text at each end."""
    if fields["expected"]:
        return f"it has issued {fields['got']}, which is not completed" if fields["got"] else "it has not issued the message"
    return f"epoch {seen}" if seen else "no signal yet"


def group_aborted(group: str, *, where: str, reason: str) -> GroupAbortedError:
    """Return the error of a wait, or a call, of a group that this rank has aborted."""
    return GroupAbortedError(
        f"this rank aborted group '{group}'" if group else "this rank aborted the group",
        where=where,
        got=reason,
        fix="to go on, destroy the process group on all ranks and make it again",
    )


def _group_lock_timeout(fields: dict[str, str]) -> UbOverlapError:
    rank, waited = int(fields["ranks"]), float(fields["waited_s"])
    fix = "look for what blocks that call's stream"
    if _hardware_queues() == 1:
        fix = (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue, where a call that waits for the lock also blocks "
            "the call that holds it: set it to 8 or more, or replay graphs and call ops of one group from one thread"
        )
    return DeviceTimeoutError(
        f"rank {rank} of the group waited for the group's lock on its own device"
        + (f" for {waited:g} s" if waited else "")
        + ": an earlier call of the group makes no progress there",
        ranks=(rank,),
        where=_call_text(fields),
        got=f"the call of epoch {fields['expected_epoch']} holds the lock, and none of it has run for the step deadline",
        expected="calls of a group run one after the other on a device; each ends by itself, as its waits have deadlines",
        fix=fix,
    )


def _call_text(fields: dict[str, str]) -> str:
    """Return "op at site 'site', group 'name'", "" where no call was running."""
    return f"{fields['op']} at site '{fields['site']}'{_group_text(fields)}" if fields["op"] else ""


def _group_text(fields: dict[str, str]) -> str:
    return f", group '{fields['group']}'" if fields.get("group") else ""


def _rank_mismatch(name: str, fields: dict[str, str]) -> UbOverlapError:
    culprit, reporter = int(fields["ranks"]), int(fields["reporter"])
    got, expected = f"rank {culprit}: {fields['got']}", f"rank {reporter}: {fields['expected']}"
    where = _call_text(fields)
    cls, what = SiteMismatchError, "are at different sites"
    fix = "make all ranks of a group run the same sequence of ops; look for rank-dependent control flow"
    if name == "ShapeMismatchError":
        cls, what = ShapeMismatchError, "have different sizes at one site"
        fix = "give all ranks of a group the same shapes and dtypes, or disable the site"
    if fields["op"] in ("send", "recv"):
        what, fix = "have different messages at one place of a channel", "issue the same dtype, bytes and tag on both ends"
    return cls(f"ranks {reporter} and {culprit} {what}", ranks=(culprit,), where=where, got=got, expected=expected, fix=fix)


def make(name: str, fields: dict[str, str]) -> UbOverlapError:
    """Return the error that C++ describes by class name and fields."""
    if name == "PeerTimeoutError":
        return _peer_timeout(fields)
    if name == "DeviceTimeoutError":
        return _group_lock_timeout(fields)
    if name == "GroupAbortedError":
        return group_aborted("", where=_call_text(fields), reason=fields["got"])
    if name in ("ShapeMismatchError", "SiteMismatchError"):
        return _rank_mismatch(name, fields)
    if name == "PeerFailedError":
        rank = int(fields["ranks"])
        return PeerFailedError(
            f"rank {rank} of the group failed",
            ranks=(rank,),
            where=_call_text(fields),
            got=fields["got"],
            fix=f"look at the log of rank {rank}",
        )
    cls = globals().get(name, UbOverlapError)
    plain = {key: value for key, value in fields.items() if key in ("where", "got", "expected", "fix")}
    return cls(fields.get("what", name), **plain)


def to_peers(error: BaseException, rank: int) -> dict[str, Any]:
    """Return what the peers of `rank`, which has raised `error`, learn: the ranks at fault, and the error as they raise it.

    A rank that only noticed a peer's failure is not at fault. `from_peers` is the inverse.
    """
    report: dict[str, Any] = {"rank": rank, "text": f"{type(error).__name__}: {error}"}
    if isinstance(error, (PeerTimeoutError, PeerFailedError)) and error.is_caused_by_others(rank):
        parts = ("what", "ranks", "where", "got", "expected", "fix")
        report |= {"name": type(error).__name__, **{part: getattr(error, part) for part in parts}}
    return report


def from_peers(report: dict[str, Any], rank: int, op: str, site: str) -> RankError:
    """Return the error of `rank`, which waits for a peer in `op` and has learned that this one failed."""
    ranks = report.get("ranks", ())
    if not ranks or rank in ranks:  # this rank itself is at fault: an error names others
        found = make("PeerFailedError", {"ranks": str(report["rank"]), "got": report["text"], "op": op, "site": site})
        assert isinstance(found, RankError)
        return found
    cls: Any = {"PeerTimeoutError": PeerTimeoutError, "PeerFailedError": PeerFailedError}[report["name"]]
    more = {"op": op, "site": site, "reporter": report["rank"]} if cls is PeerTimeoutError else {}
    return cls(report["what"], **{part: report[part] for part in ("ranks", "where", "got", "expected", "fix")}, **more)


def failure_record(error: BaseException) -> dict[str, Any] | None:
    """Return what C++ writes into the memory of the peers of a rank that has raised `error`: core/failure.h has the fields.

    None where the rank itself has failed.
    """
    if not isinstance(error, (PeerTimeoutError, PeerFailedError)) or not error.ranks:
        return None
    record: dict[str, Any] = {"culprit": error.ranks[0], "got": error.got}
    if isinstance(error, PeerTimeoutError):
        record |= {"op": error.op, "site": error.site, "phase": error.phase, "waited_s": error.waited_s}
        if not error.is_gone and not error.waited_s:  # the Store did not answer: say that
            record["got"] = str(error).partition("\n")[0]
            return {**record, "code": "peer_failed"}
        return {**record, "got": "", "code": "peer_died" if error.is_gone else "peer_timeout"}
    return {**record, "code": "peer_failed"}


class MissError(UbOverlapError):
    """on_unmatched="error": a collective next to a matmul could not be overlapped."""
