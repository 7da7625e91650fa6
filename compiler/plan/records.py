"""Plans and reports as stored: the fields of their JSON, which runtime/stored_file.py validates.

Fields of NotRequired may be missing in reports, which stay readable from version to version. A plan of another PLAN_VERSION
is refused, as its digest cannot be checked. A field that is not listed here is not read. This file
imports no torch.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NotRequired, TypedDict, TypeVar

from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import StoredFileError
from ub_overlap.runtime.stored_file import CheckedText, bad_field, validate

from .phase import PHASES, Phase
from .reasons import Kind, Reason
from .strategy import Mode, parse

R = TypeVar("R")
VERSION = 1
"""Of the JSON of graphs and reports."""
PLAN_VERSION = 4
"""Of the JSON of stored plans. It is raised when the digest has other content: then plans of before do not have theirs."""

_SITE = re.compile(rf"({'|'.join(PHASES)})\.[0-9]{{1,9}}(\.[a-z0-9_]+)?\Z")


class SiteName(CheckedText):
    """ "<phase>.<number>", and ".merged<number>" of a collective that was merged into it."""

    @classmethod
    def check(cls, text: str) -> None:
        if not _SITE.match(text):
            raise ValueError("a site id: forward.N, backward.N or step.N")


class KindName(CheckedText):
    """A value of Kind."""

    @classmethod
    def check(cls, text: str) -> None:
        _one_of(text, [kind.value for kind in Kind])


class ReasonName(CheckedText):
    """A value of Reason."""

    @classmethod
    def check(cls, text: str) -> None:
        _one_of(text, [reason.value for reason in Reason])


class StrategyText(CheckedText):
    """A strategy, a dispatch table, or "merged"."""

    @classmethod
    def check(cls, text: str) -> None:
        if text != Mode.MERGED.value:
            parse(text)


class Digest(CheckedText):
    """The digest of a plan, which names files."""

    @classmethod
    def check(cls, text: str) -> None:
        if not plan_store.is_digest(text):
            raise ValueError("a digest: 8 to 64 hexadecimal digits, '-' and up to 16")


def _one_of(text: str, values: list[str]) -> None:
    if text not in values:
        raise ValueError(f"one of {', '.join(values)}")


class SizesRecord(TypedDict):
    """SiteSizes."""

    kind: str
    ranks: int
    dtype: str
    matmuls: list[tuple[int, int, int, bool]]
    rows: int
    cols: int
    keep: NotRequired[bool]
    shard_dim_is_last: NotRequired[bool]
    outer: NotRequired[int]
    operands: NotRequired[str]
    wire_dtype: NotRequired[str]
    packs: NotRequired[list[int]]
    pack_copies: NotRequired[list[str]]
    independent: NotRequired[int]
    out_dtype: NotRequired[str]
    hosts: NotRequired[int]
    has_norm: NotRequired[bool]
    to_one_rank: NotRequired[bool]


class SavedActivationRecord(TypedDict):
    """SavedActivation."""

    keeps: str
    gathered_bytes: int
    shard_bytes: int
    again_us: float


class IndependentEstimateRecord(TypedDict):
    """IndependentEstimate."""

    saves_us: float
    holds_bytes: int
    peak_bytes: int
    own_us: float | None


class HalfWindowRecord(TypedDict):
    """SplitWindow of the first half of a hierarchical collective."""

    slot: int
    order: NotRequired[int]
    starts: int
    finishes: int
    landing_bytes: int
    transfer_us: float
    exposed_us: float
    transport: NotRequired[str]
    releases: NotRequired[int | None]
    finish_order: NotRequired[int | None]
    bucket: NotRequired[SiteName | None]
    first_half: NotRequired[None]


class SplitWindowRecord(HalfWindowRecord):
    """SplitWindow."""

    first_half: NotRequired[HalfWindowRecord | None]  # type: ignore[misc]


class SiteRecord(TypedDict):
    """Decision."""

    id: SiteName
    kind: KindName
    phase: Phase
    strategy: StrategyText
    reason: ReasonName | None
    detail: str
    group: str
    ranks: int
    shapes: dict[str, str]
    dtype: str
    matmuls: list[str]
    options: list[str]
    bytes: int | None
    flops: int | None
    module: str
    source: str
    wire_dtype: NotRequired[str]
    sent_dtype: NotRequired[str]
    rounds: NotRequired[bool]
    saved_bytes: NotRequired[int | None]
    reordered: NotRequired[str]
    scale: NotRequired[float]
    packs: NotRequired[list[int]]
    pack_bytes: NotRequired[int | None]
    takes: NotRequired[list[str]]
    paired: NotRequired[list[str]]
    predicted: NotRequired[dict[str, float]]
    work: NotRequired[SizesRecord | None]
    rows: NotRequired[int | None]
    kept: NotRequired[SavedActivationRecord | None]
    pairing: NotRequired[IndependentEstimateRecord | None]
    window: NotRequired[SplitWindowRecord | None]


class CastRecord(TypedDict):
    """CastDecision."""

    node: str
    role: str
    module: str
    shape: str
    recipe: str
    reason: ReasonName | None
    detail: NotRequired[str]


class PlanRecord(TypedDict):
    """Plan."""

    version: Literal[4]
    digest: Digest
    graph: NotRequired[str]
    shared: NotRequired[dict[str, Any]]
    phase: Phase
    profile: NotRequired[str]
    sites: list[SiteRecord]
    casts: NotRequired[list[CastRecord]]


class TunedRecord(TypedDict):
    """TunedStrategy."""

    strategy: str
    us: dict[str, float]


class ReportedSiteRecord(SiteRecord):
    """ReportedDecision."""

    plan: NotRequired[str]
    predicted_by: NotRequired[str]
    calls: NotRequired[int | None]
    executed: NotRequired[str | None]
    calls_by_strategy: NotRequired[dict[str, int]]
    tuned: NotRequired[dict[str, TunedRecord]]
    transport: NotRequired[str | None]
    bytes_copied: NotRequired[int | None]
    bytes_overlapped: NotRequired[int | None]
    measured_us: NotRequired[float | None]
    error: NotRequired[float | None]
    matmul_us: NotRequired[float | None]
    communication_us: NotRequired[float | None]
    predicted_us: NotRequired[dict[str, float] | None]
    choice: NotRequired[str | None]
    best: NotRequired[str | None]
    gain_us: NotRequired[float | None]
    choice_reason: NotRequired[str | None]


class ReportedCastRecord(CastRecord):
    """ReportedCast."""

    error: NotRequired[float | None]


class LaneRecord(TypedDict):
    """The steps of a site: (queue, text, begin, end)."""

    what: str
    us: float
    steps: list[tuple[str, str, float, float]]


class SnapshotRecord(TypedDict):
    """A graph; compiler/diff/snapshot.py reads its rows."""

    version: Literal[1]
    phase: str
    label: str
    lineage: str
    torch: str
    columns: list[str]
    texts: list[str]
    nodes: list[list[Any]]


class GraphsRecord(TypedDict):
    """The graph of a plan before and after the rewrite."""

    plan: str
    phase: Phase
    before: SnapshotRecord
    after: SnapshotRecord
    joint: NotRequired[tuple[SnapshotRecord, SnapshotRecord] | None]


class ExposedGroupRecord(TypedDict):
    """ExposedGroup."""

    sites: list[str]
    kind: str
    phase: str
    module: str
    strategy: str
    reason: str
    us: float
    is_measured: bool
    advice: str
    paste: str
    page: str


class WhatNextRecord(TypedDict):
    """WhatNext."""

    headline: str
    groups: list[ExposedGroupRecord]


class ReportRecord(TypedDict):
    """Report, and a plan of `plan --save`, which has no figures and no graphs."""

    version: Literal[1]
    plans: list[str]
    profiles: NotRequired[dict[str, str]]
    profile: NotRequired[str]
    summary: NotRequired[str]
    totals: NotRequired[str]
    sites: list[ReportedSiteRecord]
    what_next: NotRequired[WhatNextRecord]
    casts: NotRequired[list[ReportedCastRecord]]
    lanes: NotRequired[dict[str, list[LaneRecord]]]
    graphs: NotRequired[list[GraphsRecord]]


def as_record(value: Any, record: type[R], where: str, what: str) -> R:
    """Return parsed JSON as a record. StoredFileError names `where` and the field. `what`: e.g. "a plan"."""
    if not isinstance(value, dict):
        raise bad_field(where, what, "", f"a {type(value).__name__}", "a JSON object")
    version = PLAN_VERSION if record is PlanRecord else VERSION
    if value.get("version") != version:
        raise StoredFileError(
            f"not {what}: field version", where=where, got=repr(value.get("version"))[:20], expected=str(version),
            fix="another version of ub_overlap wrote it, or it is another file",
        )  # fmt: skip
    return validate(value, record, where, what)
