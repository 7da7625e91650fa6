"""The vocabulary of a compilation: Reason, Decision, Plan (and Strategy, which strategy.py defines).

A `Plan` holds one `Decision` for every collective of a graph, in graph order. It is frozen, hashable by its digest and
JSON: the rewrite obeys it, the report shows it, and all ranks of a group compare its digest before the first call.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Self

from .strategy import MAX_CHUNKS, NONE, DispatchTable, Mode, Strategy, parse

__all__ = ["MAX_CHUNKS", "NONE", "Decision", "DispatchTable", "Kind", "Mode", "Plan", "Reason", "SiteSizes", "Strategy"]


class Kind(str, Enum):
    """What meets a matmul, and how. The gathers and scatters are named after the collective, whichever operand it feeds."""

    ALL_GATHER_MATMUL = "all_gather_matmul"
    MATMUL_REDUCE_SCATTER = "matmul_reduce_scatter"
    MATMUL_ALL_REDUCE = "matmul_all_reduce"
    ALL_GATHER = "all_gather"
    """An all_gather that feeds no matmul: only bulk overlap can hide it."""
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    OTHER = "other"
    """A collective of another kind (all_to_all, broadcast, coalesced forms), listed so that nothing is silent."""


class Reason(str, Enum):
    """Why a collective is left alone, or a product is not computed in float8. Closed: each is documented here and tested."""

    DISABLED_BY_USER = "disabled_by_user"
    """overlap="off", or the plan file says none."""
    BELOW_THRESHOLD = "below_threshold"
    """overlap="auto" and the payload is smaller than `min_bytes`."""
    NO_GAIN = "no_gain"
    """overlap="auto" and no strategy is predicted to be faster than the plain way, by more than predictions err."""
    NO_MATMUL = "no_matmul"
    """No matmul produces or consumes the collective's tensor, and no independent matmul can run beside it."""
    TRIVIAL_GROUP = "trivial_group"
    """The group has one rank: nothing travels."""
    NO_TRANSPORT = "no_transport"
    """The runtime cannot reach the group's ranks: the device has no executor in this build, or the ranks share no host."""
    GROUP_NOT_STATIC = "group_not_static"
    """The group is a value of the graph (compile_on_one_rank), not a name."""
    DTYPE_UNSUPPORTED = "dtype_unsupported"
    """Not float32, bfloat16 or float16 on both sides."""
    REDUCE_OP_UNSUPPORTED = "reduce_op_unsupported"
    """Another reduction than sum and avg."""
    COLLECTIVE_UNSUPPORTED = "collective_unsupported"
    """Coalesced, in-place or other collectives."""
    UNEVEN_SHARDS = "uneven_shards"
    """The gathered or scattered tensor is padded and trimmed: rows of the pad would be computed and moved."""
    SHARD_ORDER = "shard_order"
    """A cat puts the shards back in another order, or its slices do not cover them exactly: not a plain gather."""
    LAYOUT = "layout"
    """Views or permutes between collective and matmul mix the sharded dimension with others."""
    CAST_IN_BETWEEN = "cast_in_between"
    """A cast that cannot move: other users need other bits, a cast came before, or it narrows before a sum."""
    SCALE_NOT_CONSTANT = "scale_not_constant"
    """The product is scaled by a tensor before the reduction; only a constant commutes on every rank."""
    NON_LINEAR = "non_linear"
    """Something that does not commute with the collective stands between it and the matmul."""
    BROADCAST_SUM = "broadcast_sum"
    """A sum before the reduction broadcasts its terms."""
    DEPENDENT_OPERAND = "dependent_operand"
    """The matmul's other operand depends on the collective, or on another matmul of the site."""
    MATMUL_TAKEN = "matmul_taken"
    """Every matmul that could hide this collective already hides another."""
    MEMORY = "memory"
    """The matmuls that could hide it would hold so much memory for so long that the graph's peak would pass its limit."""
    MUTATION_BARRIER = "mutation_barrier"
    """An op with side effects lies between the members of the site, or random numbers would be drawn in another order."""
    DYNAMIC_SHAPE = "dynamic_shape"
    """A size that the op needs is symbolic and cannot be read off the shard, or off the graph's inputs."""
    SCALES = "scales"
    """It carries scales of float8 tensors: too small to hide, and waited for before anything else can begin."""
    SCALED_FORM = "scaled_form"
    """A float8 product in a form that the ops do not take."""
    FILTERED = "filtered"
    """A linear that `fp8_filter` keeps in high precision."""
    SIZES_NOT_16 = "sizes_not_16"
    """A product whose inner dim or columns do not certainly divide by 16, on all ranks, as float8 products must."""
    RECIPE = "recipe"
    """A product that the recipe of float8 keeps in high precision."""
    STRATEGY_ILLEGAL = "strategy_illegal"
    """The plan or a rule forces a strategy that this kind of site does not have: stripes where nothing is reduced, or where
    the shards cannot be cut."""


def collective_of(kind: str) -> str:
    """ "matmul_reduce_scatter" -> "reduce_scatter"."""
    return kind.removesuffix("_matmul").removeprefix("matmul_")


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
    whole: bool = False
    """Shards of the last dim, which cannot be cut."""
    outer: int = 1
    """Blocks of rows that a shard consists of: a batch in front of the gathered or scattered dim."""
    operands: str = ""
    """Type of the matmuls' operands where it is not `dtype`, in which the collective's tensor travels."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "ranks": self.ranks, "dtype": self.dtype, "matmuls": [list(m) for m in self.matmuls],
            "rows": self.rows, "cols": self.cols, "keep": self.keep, "whole": self.whole, "outer": self.outer,
            "operands": self.operands,
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
            "takes": list(self.takes), "paired": list(self.paired),
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
            takes=tuple(d.get("takes", ())), paired=tuple(d.get("paired", ())),
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


@dataclass(frozen=True)
class Plan:
    """The decisions of one graph. `digest` names it in ops, stores and fingerprints: equal on all ranks of a group."""

    phase: str
    decisions: tuple[Decision, ...]
    profile: str = ""
    """The device profiles that its choices rest on, by name and digest; "" where no choice needed one."""
    casts: tuple[CastDecision, ...] = ()
    """The products of linears that the float8 pass looked at, in graph order; empty without it."""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        text = json.dumps(self.shared, sort_keys=True)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest()[:16])

    @property
    def shared(self) -> dict[str, Any]:
        """All that the ranks of a group must have in common, and nothing else: the digest is made of it, and where digests
        differ the first part that differs is what an error names (runtime/session/plan_mismatch.py). Causes stand before what they cause.

        What decides how ranks talk to each other and in which order, and the module so that stored plans of twins do not mix.
        Node names, source lines and sentences only explain. Of the shapes only those count that the ranks must share: not the
        matmuls' own (the last columns of a weight may lie on fewer ranks), none of what is left alone. What is quantised must
        be so on all ranks: scales and gathered bytes are theirs together."""
        return {
            "profile": self.profile,
            "phase": self.phase,
            "casts": [{"module": c.module, "role": c.role, "recipe": c.recipe} for c in self.casts],
            "sites": [
                {
                    "id": d.id, "kind": d.kind.value, "strategy": str(d.strategy), "group": d.group, "ranks": d.ranks,
                    "dtype": d.dtype, "module": d.module, "takes": list(d.takes), "shapes": d.shared_shapes,
                    "keeps": d.kept.keeps if d.kept else None,
                }
                for d in self.decisions
            ],
        }  # fmt: skip

    @property
    def graph(self) -> str:
        """Names the graph whatever is decided on it: the same for plans that differ in strategies, and in what is float8. So
        without what float8 adds and changes: collectives of scales, numbers and types."""
        own = [d for d in self.decisions if d.reason is not Reason.SCALES and d.strategy.mode is not Mode.MERGED]
        rows = [[collective_of(d.kind.value), d.group, d.ranks, d.module] for d in own]
        return hashlib.sha256(json.dumps([self.phase, rows]).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": 1,
                "digest": self.digest,
                "graph": self.graph,
                "shared": self.shared,
                "phase": self.phase,
                "profile": self.profile,
                "sites": [d.to_dict() for d in self.decisions],
                "casts": [c.to_dict() for c in self.casts],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        d = json.loads(text)
        if d.get("version") != 1:
            raise ValueError(f"plan: got version {d.get('version')!r}, expected 1; made by another version of ub_overlap")
        return cls(
            d["phase"],
            tuple(Decision.from_dict(s) for s in d["sites"]),
            d.get("profile", ""),
            tuple(CastDecision.from_dict(c) for c in d.get("casts", [])),
        )
