"""`doctor --flight DIR`: merge the flight records of all ranks, and say which rank is behind, where, and who disagrees.

Reads the JSON files of runtime/session/flight.py. Needs no torch. Sessions are matched by their id. Calls of a group are
numbered from 1 on every rank, so calls of one number must be equal on all ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ub_overlap.runtime import stored_file
from ub_overlap.runtime.errors import StoredFileError, ranks_text

VERSION = 1
_EXPECTED = "a flight record of ub_overlap"
_NAME = re.compile(r"rank-?\d+-(.+-)?\d+\.json")
"""File names of runtime/session/flight.py: rank, host, process."""


@dataclass(frozen=True)
class Member:
    """The view of one rank of a group. `calls`: made so far. `records`: the last of them by number."""

    rank: int
    calls: int
    waiting_for: tuple[int, ...]
    records: Mapping[int, Mapping[str, Any]]
    file: str = ""
    reason: str = ""

    def text_of(self, number: int) -> tuple[str, ...] | None:
        """Return what must be equal on all ranks of a call, None where the call is not kept."""
        record = self.records.get(number)
        return None if record is None else tuple(str(record[key]) for key in ("op", "site", "shapes"))

    @property
    def state(self) -> str:
        """State of the last call."""
        return str(self.records[self.calls]["state"]) if self.calls in self.records else "none"


@dataclass(frozen=True)
class Finding:
    """The merged view of one group. `ranks_at_fault`: those that are behind, disagree or left no record; () for none."""

    group: str
    device: str
    ranks: int
    members: tuple[Member, ...]
    ranks_at_fault: tuple[int, ...] = ()
    lines: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        rows = [{"rank": m.rank, "calls": m.calls, "state": m.state, "waiting_for": list(m.waiting_for)} for m in self.members]
        return {
            "group": self.group,
            "device": self.device,
            "ranks": self.ranks,
            "members": rows,
            "ranks_at_fault": list(self.ranks_at_fault),
            "text": list(self.lines),
        }


def read_folder(folder: Path, skipped: Callable[[StoredFileError], None]) -> list[dict[str, Any]]:
    """Return the contents of the flight records of a folder. `skipped`: told of each bad file.

    StoredFileError if the folder has no good one."""
    contents = []
    bad: list[StoredFileError] = []
    for path in sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)):
        try:
            contents.append(read_file(path))
        except StoredFileError as error:
            bad.append(error)
    if not contents and len(bad) == 1:
        raise bad[0]
    for error in bad:
        skipped(error)
    if not contents:
        raise StoredFileError(
            "no flight records", where=str(folder), expected="files rank<R>-<host>-<pid>.json of UB_OVERLAP_FLIGHT_DIR"
        )
    return contents


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a flight record. StoredFileError for another or a damaged file."""
    content = stored_file.read_json(path, _EXPECTED)
    if not isinstance(content, dict) or content.get("version") != VERSION or not isinstance(content.get("groups"), list):
        raise StoredFileError("not a flight record", where=str(path), expected=f"{_EXPECTED}, version {VERSION}")
    content = {**content, "file": path.name}
    try:
        merge([content])
    except StoredFileError as error:
        raise StoredFileError(error.what, where=str(path), got=error.got, expected=error.expected) from error
    return content


def merge(contents: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return a finding for each group with several ranks, those at fault first."""
    sessions: dict[str, dict[int, tuple[float, Mapping[str, Any], Mapping[str, Any]]]] = {}
    try:
        for content in contents:
            for group in content["groups"]:
                if group["id"] and group["ranks"] > 1:
                    rows, rank, time = sessions.setdefault(str(group["id"]), {}), int(group["rank"]), float(content["time"])
                    if rank not in rows or rows[rank][0] < time:
                        rows[rank] = (time, group, content)
        findings = [_judge(sessions[key]) for key in sorted(sessions)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoredFileError("a damaged flight record", got=f"{type(error).__name__}: {error}", expected=_EXPECTED) from error
    return sorted(findings, key=lambda finding: not finding.ranks_at_fault)


def _judge(rows: Mapping[int, tuple[float, Mapping[str, Any], Mapping[str, Any]]]) -> Finding:
    members = tuple(
        Member(
            rank=rank,
            calls=int(group["calls"]),
            waiting_for=tuple(group["waiting_for"]),
            records={int(record["number"]): record for record in group["records"]},
            file=str(content["file"]),
            reason=str(content.get("reason", "")).partition("\n")[0],
        )
        for rank, (_, group, content) in sorted(rows.items())
    )
    first = next(iter(rows.values()))[1]
    finding = Finding(str(first["group"]), str(first["device"]), int(first["ranks"]), members)
    lines: list[str] = []
    missing = [rank for rank in first.get("members") or range(finding.ranks) if rank not in rows]
    fault = list(missing)
    if missing:
        lines.append(f"{ranks_text(missing)} left no record: killed, stopped, on another host, or with another folder")
    fault += _mismatch(members, lines) or _behind(members, lines)
    return Finding(finding.group, finding.device, finding.ranks, members, tuple(sorted(set(fault))), tuple(lines))


def _call(text: Sequence[str]) -> str:
    return f"{text[0]} at site '{text[1]}' ({text[2].rstrip('; ')})"


def _mismatch(members: Sequence[Member], lines: list[str]) -> list[int]:
    """Return the ranks whose call differs from that of most ranks, at the first number where ranks differ."""
    for number in sorted({number for member in members for number in member.records}):
        texts = {member.rank: text for member in members if (text := member.text_of(number)) is not None}
        if len(set(texts.values())) < 2:
            continue
        usual, votes = Counter(texts.values()).most_common(1)[0]
        odd = [rank for rank, text in texts.items() if text != usual]
        lines.append(f"the ranks disagree at call {number}:")
        for text in dict.fromkeys(texts.values()):
            ranks = [rank for rank, other in texts.items() if other == text]
            lines.append(f"  {ranks_text(ranks)}: {_call(text)}")
        return odd if votes > len(odd) else sorted(texts)
    return []


def _behind(members: Sequence[Member], lines: list[str]) -> list[int]:
    """Return the ranks that made fewer calls than others, else those that the others wait for."""
    most = max(member.calls for member in members)
    late = [member for member in members if member.calls < most]
    if late:
        ahead = next(member for member in members if member.calls == most)
        least = min(member.calls for member in late)
        behind = [member for member in late if member.calls == least]
        text = ahead.text_of(least + 1)
        where = _call(text) if text else "a call that is no longer recorded"
        lines.append(f"{ranks_text([m.rank for m in behind])} did not make call {least + 1}: {where}")
        for member in behind:
            last = member.text_of(member.calls)
            if last:
                lines.append(f"  the last call of rank {member.rank}, {member.calls}, is {member.state}: {_call(last)}")
        return [member.rank for member in behind]
    stuck = [member for member in members if member.state not in ("finished", "none")]
    if not stuck:
        lines.append(f"all ranks finished their {most} calls" if most else "no calls")
        return []
    text = stuck[0].text_of(most)
    lines.append(f"{ranks_text([m.rank for m in stuck])} did not finish call {most}: {_call(text) if text else ''}")
    awaited = {rank for member in stuck for rank in member.waiting_for}
    busy = [member.rank for member in members if member.rank in awaited and not member.waiting_for]
    if busy:
        lines.append(f"  {ranks_text(busy)} waits for no rank, and is waited for")
    return busy


def text(findings: Sequence[Finding]) -> str:
    """Return the findings as text."""
    lines = []
    for finding in findings:
        lines.append(f"group '{finding.group}' on {finding.device}, {finding.ranks} ranks")
        lines += [f"  {line}" for line in finding.lines]
        for member in finding.members:
            waits = f", waits for {ranks_text(member.waiting_for)}" if member.waiting_for else ""
            lines.append(f"    rank {member.rank}: {member.calls} calls, the last {member.state}{waits}  ({member.file})")
            if member.reason:
                lines.append(f"      {member.reason}")
    return "\n".join(lines) if lines else "no group of several ranks"
