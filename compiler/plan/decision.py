"""The records of what was decided: one `Decision` for a collective, one `CastDecision` for a float8 product."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from .reasons import Kind, Reason
from .strategy import DispatchTable, Mode, Strategy, parse


@dataclass(frozen=True, slots=True)
class SiteSizes:
    """What a site computes and moves, in elements, as one rank sees it; cost.shape.SiteShape reckons with it."""

    kind: str
    """Of the schedule: "bulk_..." for a collective beside its matmuls, and for one that has none."""
    ranks: int
    dtype: str
    matmuls: tuple[tuple[int, int, int, bool], ...]
    """(M, N, K, contracts) of this rank, as whole products: M of a gather's product counts the gathered rows, K of one that
    contracts over the gathered dim the gathered K."""
    rows: int
    cols: int
    """[rows, cols] of the collective's whole tensor: what all ranks gather, or what is reduced."""
    keep: bool = False
    """The gathered tensor is wanted as well."""
    shard_dim_is_last: bool = False
    """Shards of the last dim, which cannot be cut."""
    outer: int = 1
    """ShardBlocks of rows that a shard consists of: a batch in front of the gathered or scattered dim."""
    operands: str = ""
    """Type of the matmuls' operands where it is not `dtype`, in which the collective's tensor travels."""
    wire_dtype: str = ""
    """"float8" where a reduction sends `dtype` as float8 with scales; "" where it sends `dtype`."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "ranks": self.ranks, "dtype": self.dtype, "matmuls": [list(m) for m in self.matmuls],
            "rows": self.rows, "cols": self.cols, "keep": self.keep, "shard_dim_is_last": self.shard_dim_is_last,
            "outer": self.outer, "operands": self.operands, "wire_dtype": self.wire_dtype,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        known: dict[str, Any] = {**d, "matmuls": tuple(tuple(m) for m in d["matmuls"])}
        return cls(**known)


@dataclass(frozen=True, slots=True)
class SavedActivation:
    """What backward keeps of a gathered tensor (bytes of one rank), and what the other way would have cost."""

    keeps: str
    """"gathered", or "shard": then it is gathered again."""
    gathered_bytes: int
    shard_bytes: int
    again_us: float
    """What gathering again adds to backward, as predicted."""

    def __str__(self) -> str:
        took = self.shard_bytes if self.keeps == "shard" else self.gathered_bytes
        return (
            f"backward keeps the {self.keeps} ({took} bytes; gathered {self.gathered_bytes} and 0 us, shard {self.shard_bytes} "
            f"and {self.again_us:.0f} us to gather again)"
        )


@dataclass(frozen=True, slots=True)
class BulkEstimate:
    """What a collective would save beside matmuls that have nothing to do with it, what that costs in memory, and what it would
    save with its own matmuls instead (which hold nothing longer). As predicted, against the plain way."""

    saves_us: float
    holds_bytes: int
    """Operands and results that live longer."""
    peak_bytes: int
    """By which the graph's peak grows."""
    own_us: float | None
    """None where its own matmuls save nothing, or it has none."""

    def __str__(self) -> str:
        own = "it has none of its own that save" if self.own_us is None else f"its own save {self.own_us:.0f} us and hold 0"
        return (
            f"beside other matmuls it saves {self.saves_us:.0f} us, {self.holds_bytes} bytes live longer and the peak grows by "
            f"{self.peak_bytes}; {own}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided for one collective, and everything needed to explain it."""

    id: str
    """"<phase>.<number in graph order>"; a site of the op's `site` argument."""
    kind: Kind
    phase: str
    """"forward" (also inference) or "backward"."""
    strategy: Strategy | DispatchTable
    reason: Reason | None = None
    """Set exactly when strategy.mode is none."""
    detail: str = ""
    """The reason (or the choice) in a sentence, with values."""
    group: str = ""
    """"g<ordinal>": groups numbered by first use in the graph, because c10d names differ between ranks."""
    ranks: int = 0
    shapes: tuple[tuple[str, str], ...] = ()
    """(what, "[rows, cols]") pairs; symbols stand for dynamic sizes."""
    dtype: str = ""
    matmuls: tuple[str, ...] = ()
    """Names of the graph's matmul nodes that the site takes."""
    takes: tuple[str, ...] = ()
    """The same of what is overlapped, by names that all ranks have in common: "<module>#<which matmul of it>"."""
    paired: tuple[str, ...] = ()
    """Of a bulk site: those matmuls with their modules, and the sites that they could have belonged to."""
    options: tuple[str, ...] = ()
    """Modes that would be legal for this site."""
    wire_dtype: str = ""
    """"float8" where float8 products are scattered as float8; "" where a site sends the type of its tensor."""
    bytes: int | None = None
    """Bytes each rank sends (None where dynamic)."""
    flops: int | None = None
    module: str = ""
    """Path of the nn.Module that traced the collective or its matmul."""
    source: str = ""
    """"file:line: code" of the same."""
    predicted: tuple[tuple[str, float], ...] = ()
    """(strategy, microseconds) of everything that was weighed; empty where nothing was."""
    work: SiteSizes | None = None
    """None where a size has no value, or the dtype or the collective no cost."""
    rows: int | None = None
    """Of a call as traced: by these a table picks."""

    kept: SavedActivation | None = None
    """Of a gather of the forward that backward reads, where that was weighed (save="shard", memory_budget)."""

    pairing: BulkEstimate | None = None
    """Where matmuls of others could hide it, and that was weighed."""

    @property
    def overlapped(self) -> bool:
        return self.strategy.mode in (Mode.PIPELINED, Mode.BULK)

    @property
    def traced(self) -> Strategy:
        """What a call of the traced sizes runs by, as long as nothing has been measured."""
        return self.strategy.at(self.rows or 0)

    @property
    def shared_shapes(self) -> dict[str, str]:
        """The shapes that all ranks must bring alike."""
        return {what: shape for what, shape in self.shapes if self.overlapped and not what.startswith("matmul")}

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id, "kind": self.kind.value, "phase": self.phase, "strategy": str(self.strategy),
            "reason": self.reason.value if self.reason else None, "detail": self.detail, "group": self.group,
            "ranks": self.ranks, "shapes": dict(self.shapes), "dtype": self.dtype, "matmuls": list(self.matmuls),
            "takes": list(self.takes), "paired": list(self.paired), "wire_dtype": self.wire_dtype,
            "options": list(self.options), "bytes": self.bytes, "flops": self.flops, "module": self.module,
            "source": self.source, "predicted": dict(self.predicted), "work": self.work.to_dict() if self.work else None,
            "rows": self.rows,
            "kept": asdict(self.kept) if self.kept else None,
            "pairing": asdict(self.pairing) if self.pairing else None,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Decision:
        merged = Strategy(Mode.MERGED)
        return cls(
            id=d["id"], kind=Kind(d["kind"]), phase=d["phase"],
            strategy=merged if d["strategy"] == str(merged) else parse(d["strategy"]),
            reason=Reason(d["reason"]) if d["reason"] else None, detail=d["detail"], group=d["group"], ranks=d["ranks"],
            shapes=tuple(d["shapes"].items()), dtype=d["dtype"], matmuls=tuple(d["matmuls"]), options=tuple(d["options"]),
            wire_dtype=d.get("wire_dtype", ""), takes=tuple(d.get("takes", ())), paired=tuple(d.get("paired", ())),
            bytes=d["bytes"], flops=d["flops"], module=d["module"], source=d["source"],
            predicted=tuple(d.get("predicted", {}).items()),
            work=SiteSizes.from_dict(d["work"]) if d.get("work") else None, rows=d.get("rows"),
            kept=SavedActivation(**d["kept"]) if d.get("kept") else None,
            pairing=BulkEstimate(**d["pairing"]) if d.get("pairing") else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CastDecision:
    """What the float8 pass made of one product of a linear."""

    node: str
    """Name of the 16-bit product's node."""
    role: str
    """"forward", "input gradient" or "weight gradient"."""
    module: str
    shape: str
    """"[M, K] @ [K, N]" on this rank."""
    recipe: str
    """The recipe that it is computed by; "" in high precision."""
    reason: Reason | None = None
    """Set exactly when recipe is ""."""
    detail: str = ""

    @property
    def key(self) -> str:
        """What its error is measured under (runtime/verify.py)."""
        return f"{self.recipe}/{self.module}/{self.role}/{self.node}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "reason": self.reason.value if self.reason else None}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> CastDecision:
        known: dict[str, Any] = {**d, "reason": Reason(d["reason"]) if d["reason"] else None}
        return cls(**known)
