"""Every error a user can meet. A message says what went wrong, where, what was got and expected, and what to do.

C++ raises these too: it calls `make` with a class name and fields (csrc/bindings/errors.cpp), so texts are written here only.
"""

from __future__ import annotations

from collections.abc import Sequence


class UbOverlapError(RuntimeError):
    """The base of all errors of this library.

    `what` went wrong, `where` (site, op, file), what was `got` and `expected`, and how to `fix` it; empty where unknown.
    """

    def __init__(self, what: str, *, where: str = "", got: str = "", expected: str = "", fix: str = "") -> None:
        self.what, self.where, self.got, self.expected, self.fix = what, where, got, expected, fix
        super().__init__(self.message())

    def message(self) -> str:
        lines = [self.what]
        for label, text in (("where", self.where), ("got", self.got), ("expected", self.expected), ("fix", self.fix)):
            if text:
                lines.append(f"  {label + ':':<10}{text}")
        return "\n".join(lines)


class OptionError(UbOverlapError, ValueError):
    """A setting, an option or an argument that cannot be."""


class PlanMismatchError(UbOverlapError):
    """The ranks of a group compiled different plans. `ranks`: those whose plan differs from this rank's. `diff`: how the graph
    of the first of them differs from this rank's, "" where nobody kept both."""

    ranks: tuple[int, ...] = ()
    diff: str = ""

    def message(self) -> str:
        return super().message() + (f"\n{self.diff}" if self.diff else "")


class PeerTimeoutError(UbOverlapError):
    """Ranks of the group did not come before the deadline, or their processes are gone.

    `ranks`: their ranks in the group. `op`, `site`, `phase`, `chunk`: what was waited for; `expected_epoch` and
    `observed_epoch`: the call it belongs to and the last one that was seen. `reporter`: the rank that noticed.
    """

    ranks: tuple[int, ...] = ()
    op: str = ""
    site: str = ""
    phase: str = ""
    chunk: int = -1
    expected_epoch: int = 0
    observed_epoch: int = 0
    reporter: int = -1


class ShapeMismatchError(UbOverlapError):
    """A peer brought other sizes or dtypes to the same site. `ranks`: the peer."""

    ranks: tuple[int, ...] = ()


class SiteMismatchError(UbOverlapError):
    """A peer is at another site of the program. `ranks`: the peer."""

    ranks: tuple[int, ...] = ()


class PeerFailedError(UbOverlapError):
    """A peer raised an error of its own and told the group. `ranks`: the peer."""

    ranks: tuple[int, ...] = ()


class SessionPoisonedError(UbOverlapError):
    """An earlier error left the ranks of this group out of step; it cannot be used any more."""


class BuildMismatchError(UbOverlapError):
    """The compiled extension is missing, or was built for another torch or another version than what it meets."""


class ArenaError(UbOverlapError):
    """Shared memory could not be made, grown or attached."""


class ForkError(UbOverlapError):
    """A session was used in a child forked from the process that made it."""


class TransportError(UbOverlapError):
    """There is no way to carry this call out on this device."""


class Fp8StateError(UbOverlapError, ValueError):
    """Histories of delayed scaling that do not fit what is asked of them."""


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _timeout(fields: dict[str, str]) -> UbOverlapError:
    rank, waited, silent = int(fields["ranks"]), fields["waited_s"], float(fields["silent_s"])
    who = f"rank {rank} of the group"
    if fields["dead"] == "1":
        what = f"{who} is gone: its process ended during a call"
    else:
        what = f"{who} did not come within {waited} s"
        if silent > 1:
            what += f" (no sign of life for {silent:.1f} s)"
    error = PeerTimeoutError(
        what,
        where=f"{fields['op']} at site '{fields['site']}', phase {fields['phase']}, chunk {fields['chunk']}; "
        f"noticed by rank {fields['reporter']}",
        got=f"epoch {fields['observed_epoch']}",
        expected=f"epoch {fields['expected_epoch']}",
        fix=f"look at the log and the stack of rank {rank}; if it is only slow, raise UB_OVERLAP_STEP_TIMEOUT_S",
    )
    error.ranks, error.op, error.site, error.phase = (rank,), fields["op"], fields["site"], fields["phase"]
    error.chunk, error.reporter = int(fields["chunk"]), int(fields["reporter"])
    error.expected_epoch, error.observed_epoch = int(fields["expected_epoch"]), int(fields["observed_epoch"])
    return error


def _mismatch(name: str, fields: dict[str, str]) -> UbOverlapError:
    culprit, reporter = int(fields["ranks"]), int(fields["reporter"])
    got, expected = f"rank {culprit}: {fields['got']}", f"rank {reporter}: {fields['expected']}"
    where = f"{fields['op']} at site '{fields['site']}'"
    if name == "ShapeMismatchError":
        error: UbOverlapError = ShapeMismatchError(
            f"ranks {reporter} and {culprit} brought different sizes to one site",
            where=where,
            got=got,
            expected=expected,
            fix="give all ranks of a group the same shapes and dtypes, or disable the site",
        )
    else:
        error = SiteMismatchError(
            f"ranks {reporter} and {culprit} are at different sites",
            where=where,
            got=got,
            expected=expected,
            fix="make all ranks of a group run the same sequence of ops; look for rank-dependent control flow",
        )
    error.ranks = (culprit,)  # type: ignore[attr-defined]
    return error


def make(name: str, fields: dict[str, str]) -> UbOverlapError:
    """The error that C++ describes by class name and fields."""
    if name == "PeerTimeoutError":
        return _timeout(fields)
    if name in ("ShapeMismatchError", "SiteMismatchError"):
        return _mismatch(name, fields)
    if name == "PeerFailedError":
        rank = int(fields["ranks"])
        failed = PeerFailedError(
            f"rank {rank} of the group gave up",
            where=f"{fields['op']} at site '{fields['site']}'",
            got=fields["got"],
            fix=f"look at the log of rank {rank}",
        )
        failed.ranks = (rank,)
        return failed
    cls = globals().get(name, UbOverlapError)
    plain = {key: value for key, value in fields.items() if key in ("where", "got", "expected", "fix")}
    return cls(fields.get("what", name), **plain)


class MissError(UbOverlapError):
    """on_miss="error": a collective that meets a matmul could not be overlapped."""
