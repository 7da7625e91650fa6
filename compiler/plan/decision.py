"""The records of decisions: one `Decision` for a collective, one `CastDecision` for a float8 product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from .reasons import Kind, Reason
from .strategy import DispatchTable, Mode, Strategy, parse


@dataclass(frozen=True, slots=True)
class SiteSizes:
    """The sizes of what a site computes and sends on one rank, in elements. cost/site_shape.py predicts with them."""

    kind: str
    """Of the schedule: "bulk_..." for a collective with independent matmuls, and for one without matmuls. "fused_...": of few
    tokens, with what follows it."""
    ranks: int
    dtype: str
    matmuls: tuple[tuple[int, int, int, bool], ...]
    """(M, N, K, contracts) of this rank, as whole products: M of a gather's product counts the gathered rows, K of one that
    contracts over the gathered dim the gathered K."""
    rows: int
    cols: int
    """[rows, cols] of the collective's whole tensor: what all ranks gather, or what is reduced."""
    keep: bool = False
    """The gathered tensor, or the product before its reduction, is returned as well."""
    shard_dim_is_last: bool = False
    """Shards of the last dim, which cannot be cut."""
    outer: int = 1
    """ShardBlocks of rows that a shard consists of: a batch in front of the gathered or scattered dim."""
    operands: str = ""
    """Type of the matmuls' operands (the widest of several) where it differs from `dtype`, the collective's tensor's type."""
    wire_dtype: str = ""
    """"float8" where a reduction sends `dtype` as float8 with scales; "" where it sends `dtype`."""
    packs: tuple[int, ...] = ()
    """Numbers of neighboring `matmuls` that an overlapped site computes as one, on packed operands. Empty: each is one."""
    pack_copies: tuple[str, ...] = ()
    """For each of `packs` the operands that are copied together first: "", "lhs", "rhs" or "lhs+rhs"."""
    independent: int = 0
    """The number of the last `matmuls` that neither read nor feed the collective. Of a bulk site: all."""
    out_dtype: str = ""
    """Type of the reduced tensor where it is wider than `dtype`, which is sent and summed. The plain collective sends it."""
    hosts: int = 1
    """Hosts of the group. Across several, c10d sends, in the type of the result."""
    has_norm: bool = False
    """A norm follows the reduction of a fused collective."""
    to_one_rank: bool = False
    """Each rank sends all rows of an all_to_all to one rank, as in a step of a ring; else equal parts to all ranks."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "ranks": self.ranks, "dtype": self.dtype, "matmuls": [list(m) for m in self.matmuls],
            "rows": self.rows, "cols": self.cols, "keep": self.keep, "shard_dim_is_last": self.shard_dim_is_last,
            "outer": self.outer, "operands": self.operands, "wire_dtype": self.wire_dtype, "packs": list(self.packs),
            "pack_copies": list(self.pack_copies), "independent": self.independent, "out_dtype": self.out_dtype,
            "hosts": self.hosts, "has_norm": self.has_norm, "to_one_rank": self.to_one_rank,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        lists = {name: tuple(d.get(name, ())) for name in ("packs", "pack_copies")}
        known: dict[str, Any] = {**d, "matmuls": tuple(tuple(m) for m in d["matmuls"]), **lists}
        return cls(**known)


@dataclass(frozen=True, slots=True)
class SavedActivation:
    """The form in which backward keeps a gathered tensor: bytes of one rank, and the cost of both forms."""

    keeps: str
    """"gathered", or "shard": then it is gathered again."""
    gathered_bytes: int
    shard_bytes: int
    again_us: float
    """Predicted time that gathering again adds to backward."""

    def __str__(self) -> str:
        took = self.shard_bytes if self.keeps == "shard" else self.gathered_bytes
        return (
            f"backward keeps the {self.keeps} ({took} bytes; gathered {self.gathered_bytes} and 0 us, shard {self.shard_bytes} "
            f"and {self.again_us:.0f} us to gather again)"
        )


@dataclass(frozen=True, slots=True)
class IndependentEstimate:
    """Predicted saving of a collective with independent matmuls, its price in memory, and the saving with its own matmuls.

    Savings are against the plain collective and matmuls. Its own matmuls hold nothing longer.
    """

    saves_us: float
    holds_bytes: int
    """Bytes of operands and results that live longer, less those that live shorter."""
    peak_bytes: int
    """Bytes by which the graph's peak grows."""
    own_us: float | None
    """None where its own matmuls save nothing, or there are none."""

    def __str__(self) -> str:
        own = "its own matmuls save nothing" if self.own_us is None else f"its own matmuls save {self.own_us:.0f} us and hold 0"
        lives = "longer" if self.holds_bytes >= 0 else "shorter"
        return (
            f"with independent matmuls it saves {self.saves_us:.0f} us, {abs(self.holds_bytes)} bytes live {lives} and the "
            f"peak grows by {self.peak_bytes}; {own}"
        )


@dataclass(frozen=True, slots=True)
class SplitWindow:
    """The place of a split collective: its slot, and its ops among everything that communicates in the graph.

    Ranks agree on these; the rest is predicted. `exposed_us`: the time that the finish waits.
    """

    slot: int
    order: int
    """The number of its start among all starts, whole collectives and finishes with a `finish_order` of the graph."""
    starts: int
    finishes: int
    landing_bytes: int
    transfer_us: float
    exposed_us: float
    transport: str = ""
    """"c10d" for a group across hosts; "" where the copies are ours."""
    releases: int | None = None
    """The place of the release of a zero-copy gather; None where finish copies the result."""
    finish_order: int | None = None
    """The number of its finish as in `order`, where that waits for the finishes of other ranks; None where it does not."""
    first_half: SplitWindow | None = None
    """Of a hierarchical collective, whose second half this then is: the half whose result it sends."""
    bucket: str | None = None
    """The site that sends it together with others; None where it is sent alone. Bytes and times are its share."""

    @property
    def hidden(self) -> float:
        """The share of the transfer that is predicted to be hidden."""
        exposed, transfer = (sum(getattr(half, name) for half in self.halves) for name in ("exposed_us", "transfer_us"))
        return 1.0 - min(1.0, exposed / transfer) if transfer else 0.0

    @property
    def halves(self) -> tuple[SplitWindow, ...]:
        """The windows of a hierarchical collective in order; of another one this."""
        return (self,) if self.first_half is None else (self.first_half, self)

    @property
    def shared(self) -> list[int | str]:
        """What all ranks must agree on: slots and the order of starts, and the form. Each rank finishes where it needs the
        result, unless a finish waits for those of other ranks (docs/explanation/schedules.md)."""
        finish = [] if self.finish_order is None else [self.finish_order]
        form = [*([] if self.releases is None else ["zero-copy"]), *([f"bucket of {self.bucket}"] if self.bucket else [])]
        own = [self.slot, self.order, *finish, *form]
        return own if self.first_half is None else [*self.first_half.shared, *own]

    def __str__(self) -> str:
        if self.first_half is not None:
            return f"hierarchical: first {self.first_half}; then {replace(self, first_half=None)}"
        mib = self.landing_bytes / 2**20
        over = f"over {self.transport}, " if self.transport else ""
        release = "" if self.releases is None else f", not copied and released as number {self.releases}"
        over += f"in the bucket of {self.bucket}, " if self.bucket else ""
        return (
            f"{over}starts as number {self.starts} and finishes as number {self.finishes} of the graph's communication, in "
            f"slot {self.slot} ({mib:.1f} MiB){release}; {self.exposed_us:.0f} of {self.transfer_us:.0f} us exposed"
        )


def _read_window(d: Mapping[str, Any]) -> SplitWindow:
    """Return a window. Plans of earlier versions have no order of starts."""
    first = d.get("first_half")
    known: dict[str, Any] = {"order": 0, **d, "first_half": _read_window(first) if first else None}
    return SplitWindow(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision for one collective, and everything needed to explain it."""

    id: str
    """"<phase>.<number in graph order>"; a site of the op's `site` argument."""
    kind: Kind
    phase: str
    """"forward" (also inference), "backward", or "step": both in one graph."""
    strategy: Strategy | DispatchTable
    reason: Reason | None = None
    """Set exactly when strategy.mode is none."""
    detail: str = ""
    """The reason or the choice in a sentence, with values."""
    group: str = ""
    """"g<ordinal>": groups numbered by first use in the graph, because c10d names differ between ranks."""
    ranks: int = 0
    shapes: tuple[tuple[str, str], ...] = ()
    """(name, "[rows, cols]") pairs; symbols stand for dynamic sizes."""
    dtype: str = ""
    matmuls: tuple[str, ...] = ()
    """Names of the matmul nodes of the site."""
    takes: tuple[str, ...] = ()
    """The matmuls of an overlapped site, by names that are the same on all ranks: "<module>#<number of the matmul in it>"."""
    paired: tuple[str, ...] = ()
    """The independent matmuls of a site, with their modules and the sites whose matches contain them; of a split all_to_all
    those between its start and finish."""
    options: tuple[str, ...] = ()
    """Modes that are legal for this site."""
    wire_dtype: str = ""
    """"float8" where float8 products are scattered as float8; "" where a site sends the type of its tensor."""
    sent_dtype: str = ""
    """Type that the site sends where it is not `dtype`."""
    rounds: bool = False
    """Whether a reduction's input is rounded to `sent_dtype` (option reduce_dtype). Else it had that type before a cast."""
    saved_bytes: int | None = 0
    """Bytes that a rank sends less than traced: in a narrower type, a shard (`reordered`), or repeats once. None: dynamic."""
    reordered: str = ""
    """An all_reduce behind a reduce_scatter that it was traced in front of: the meshes of both (option scatter_first)."""
    scale: float = 1.0
    """The constant that the sum over ranks is multiplied by, in place of each rank's product: equal on all ranks."""
    packs: tuple[int, ...] = ()
    """Numbers of neighboring `matmuls` that the site computes as one, on packed operands. Empty: each is one."""
    pack_bytes: int | None = 0
    """Bytes of this rank's packed operands that are copies (None where dynamic); they live as long as the call."""
    bytes: int | None = None
    """Bytes each rank sends (None where dynamic)."""
    flops: int | None = None
    module: str = ""
    """Path of the nn.Module that the collective or its matmul comes from."""
    source: str = ""
    """"file:line: code" of the same."""
    predicted: tuple[tuple[str, float], ...] = ()
    """(strategy, microseconds) of all predicted strategies; empty where nothing was predicted."""
    work: SiteSizes | None = None
    """None where a size has no value, or the dtype or the collective no cost."""
    rows: int | None = None
    """Rows of a call as traced; dispatch tables are looked up by them."""

    kept: SavedActivation | None = None
    """For a gather of the forward that backward reads, where memory_budget is set."""

    pairing: IndependentEstimate | None = None
    """Where independent matmuls could hide it, and that was predicted."""

    window: SplitWindow | None = None
    """Of a split collective."""

    @property
    def overlapped(self) -> bool:
        return self.strategy.mode.is_overlapped

    @property
    def traced(self) -> Strategy:
        """The strategy of a call of the traced sizes, until one has been measured."""
        return self.strategy.at(self.rows or 0)

    @property
    def shared_shapes(self) -> dict[str, str]:
        """The shapes that must be equal on all ranks. Each rank exchanges rows of its own number."""
        if self.kind is Kind.ALL_TO_ALL:
            return {}
        return {what: shape for what, shape in self.shapes if self.overlapped and not what.startswith("matmul")}

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id, "kind": self.kind.value, "phase": self.phase, "strategy": str(self.strategy),
            "reason": self.reason.value if self.reason else None, "detail": self.detail, "group": self.group,
            "ranks": self.ranks, "shapes": dict(self.shapes), "dtype": self.dtype, "matmuls": list(self.matmuls),
            "takes": list(self.takes), "paired": list(self.paired), "wire_dtype": self.wire_dtype,
            "sent_dtype": self.sent_dtype, "rounds": self.rounds, "saved_bytes": self.saved_bytes,
            "reordered": self.reordered,
            "scale": self.scale, "packs": list(self.packs), "pack_bytes": self.pack_bytes,
            "options": list(self.options), "bytes": self.bytes, "flops": self.flops, "module": self.module,
            "source": self.source, "predicted": dict(self.predicted), "work": self.work.to_dict() if self.work else None,
            "rows": self.rows,
            "kept": asdict(self.kept) if self.kept else None,
            "pairing": asdict(self.pairing) if self.pairing else None,
            "window": asdict(self.window) if self.window else None,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Decision:
        merged = Strategy(Mode.MERGED)
        return cls(
            id=d["id"], kind=Kind(d["kind"]), phase=d["phase"],
            strategy=merged if d["strategy"] == str(merged) else parse(d["strategy"]),
            reason=Reason(d["reason"]) if d["reason"] else None, detail=d["detail"], group=d["group"], ranks=d["ranks"],
            shapes=tuple(d["shapes"].items()), dtype=d["dtype"], matmuls=tuple(d["matmuls"]), options=tuple(d["options"]),
            wire_dtype=d.get("wire_dtype", ""), scale=d.get("scale", 1.0),
            sent_dtype=d.get("sent_dtype", ""), rounds=d.get("rounds", False), saved_bytes=d.get("saved_bytes", 0),
            reordered=d.get("reordered", ""),
            packs=tuple(d.get("packs", ())), pack_bytes=d.get("pack_bytes", 0),
            takes=tuple(d.get("takes", ())), paired=tuple(d.get("paired", ())),
            bytes=d["bytes"], flops=d["flops"], module=d["module"], source=d["source"],
            predicted=tuple(d.get("predicted", {}).items()),
            work=SiteSizes.from_dict(d["work"]) if d.get("work") else None, rows=d.get("rows"),
            kept=SavedActivation(**d["kept"]) if d.get("kept") else None,
            pairing=IndependentEstimate(**d["pairing"]) if d.get("pairing") else None,
            window=_read_window(d["window"]) if d.get("window") else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CastDecision:
    """The decision of the float8 pass for one matmul of a linear."""

    node: str
    """Name of the node of the 16-bit matmul."""
    role: str
    """"forward", "input gradient" or "weight gradient"."""
    module: str
    shape: str
    """"[M, K] @ [K, N]" on this rank."""
    recipe: str
    """The recipe of the float8 matmul; "" in high precision."""
    reason: Reason | None = None
    """Set exactly when recipe is ""."""
    detail: str = ""

    @property
    def key(self) -> str:
        """The key of its measured error (runtime/verify.py)."""
        return f"{self.recipe}/{self.module}/{self.role}/{self.node}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "reason": self.reason.value if self.reason else None}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> CastDecision:
        known: dict[str, Any] = {**d, "reason": Reason(d["reason"]) if d["reason"] else None}
        return cls(**known)
