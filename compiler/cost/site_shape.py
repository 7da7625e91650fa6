"""The sizes of a site for the cost model.

Legend: R ranks; a shard is one rank's share of the gathered, scattered or reduced tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ub_overlap.runtime.schedule.steps import Key

from ..plan.decision import SiteSizes
from ..plan.reasons import COLLECTIVES
from ..plan.strategy import Mode, Strategy
from .wire import FLOAT8, bytes_on_wire, bytes_sent_by_rank

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
KINDS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "bulk_all_gather",
    "bulk_reduce_scatter",
    "bulk_all_reduce",
    "fused_all_gather",
    "fused_reduce_scatter",
    "fused_all_reduce",
    "all_to_all",
)


@dataclass(frozen=True, slots=True)
class SiteShape(SiteSizes):
    """The checked sizes of one site. ValueError for a kind or dtype without a cost, or a bad size."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.dtype not in SIZES or self.multiplied not in SIZES:
            raise ValueError(f"dtype {self.dtype!r}, operands {self.operands!r}: expected of {', '.join(SIZES)}")
        if self.wire_dtype not in ("", FLOAT8):
            raise ValueError(f"wire_dtype {self.wire_dtype!r}: expected '' or {FLOAT8!r}")
        if self.reduced not in SIZES:
            raise ValueError(f"out_dtype {self.out_dtype!r}: expected '' or of {', '.join(SIZES)}")
        own = len(self.own_matmuls)
        if self.packs and (sum(self.packs) != own or len(self.pack_copies) != len(self.packs)):
            raise ValueError(f"packs {self.packs}, copies {self.pack_copies}: expected of {own} matmuls")
        if self.ranks < 1 or self.rows < 0 or self.cols < 0 or any(min(m[:3]) < 0 for m in self.matmuls):
            raise ValueError(f"a size below 0, or no rank: {self}")

    @property
    def own_matmuls(self) -> tuple[tuple[int, int, int, bool], ...]:
        """The matmuls that read or feed the collective."""
        return () if self.bulk else self.matmuls[: len(self.matmuls) - self.independent]

    @property
    def bulk(self) -> bool:
        return self.kind.startswith("bulk_")

    @property
    def is_fused(self) -> bool:
        """Whether it is a collective of few tokens with what follows it, which may be one kernel."""
        return self.kind.startswith("fused_")

    @property
    def whole_bytes(self) -> int:
        """Bytes of the collective's whole tensor: what all ranks gather, or what is reduced."""
        return self.rows * self.cols * SIZES[self.dtype]

    @property
    def gathers(self) -> bool:
        return self.kind == "all_gather_matmul"

    @property
    def why_not_direct(self) -> str:
        """Why the product cannot be stored at its owners; "" where it can. (For graphs: select/legality.py.)"""
        if self.gathers or self.bulk:
            return "nothing is multiplied and then reduced"
        if self.shard_dim_is_last:
            return "shards of the last dim are no blocks of rows"
        if len(self.computed.own_matmuls) != 1 or self.multiplied != self.dtype or self.wire_dtype or self.keep:
            return "only the plain product of one matmul, without other readers, can be stored at its owners"
        return ""

    @property
    def multiplied(self) -> str:
        """The dtype of the matmuls' operands; `dtype` is that of the collective."""
        return self.operands or self.dtype

    @property
    def reduced(self) -> str:
        """The dtype of the reduced tensor; of a gather, of the gathered one."""
        return self.out_dtype or self.dtype

    @property
    def collective(self) -> str:
        """One of COLLECTIVES."""
        return next(name for name in COLLECTIVES if name in self.kind)

    @property
    def shard_bytes(self) -> float:
        """Bytes of one rank's share of the collective's tensor."""
        return self.rows * self.cols * SIZES[self.dtype] / self.ranks

    @property
    def shard_bytes_on_wire(self) -> float:
        """The same as an overlapped site sends it."""
        return bytes_on_wire(self.rows * self.cols, SIZES[self.dtype], self.wire_dtype) / self.ranks

    @property
    def reduced_shard_bytes(self) -> float:
        """Bytes of one rank's share of the reduced tensor."""
        return self.rows * self.cols * SIZES[self.reduced] / self.ranks

    @property
    def bytes_sent(self) -> float:
        """Bytes that one rank sends in the plain collective, which sends the type that it returns."""
        if self.to_one_rank:
            return self.whole_bytes
        shared = self.reduced_shard_bytes if self.collective == "all_reduce" else 0.0
        return bytes_sent_by_rank(self.reduced_shard_bytes, self.ranks, shared)

    @property
    def largest_piece_bytes(self) -> float:
        """Bytes of the largest piece of an all_to_all that one rank sends to another."""
        return self.whole_bytes if self.to_one_rank else self.shard_bytes

    @property
    def computed(self) -> SiteShape:
        """The same site with the matmuls that an overlapped call computes: one for each pack."""
        if not self.packs:
            return self
        packed = map(self._wide, self._pack_members())
        return replace(self, matmuls=(*packed, *self.matmuls[len(self.own_matmuls) :]), packs=(), pack_copies=())

    @property
    def copied_bytes(self) -> tuple[int, ...]:
        """Bytes of each matrix into which operands are copied together, and of the scales of float8 columns with them."""
        element, sizes = SIZES[self.multiplied], []
        for members, copied in zip(self._pack_members(), self.pack_copies, strict=True):
            m, n, k, _ = self._wide(members)
            sizes += [m * k * element] if "lhs" in copied else []
            sizes += [k * n * element] if "rhs" in copied else []
            sizes += [n * SIZES["float32"]] if "rhs" in copied and self.multiplied == "float8" else []
        return tuple(sizes)

    def _pack_members(self) -> list[tuple[tuple[int, int, int, bool], ...]]:
        ends = [sum(self.packs[: i + 1]) for i in range(len(self.packs))]
        return [self.matmuls[end - size : end] for size, end in zip(self.packs, ends, strict=True)]

    def _wide(self, members: tuple[tuple[int, int, int, bool], ...]) -> tuple[int, int, int, bool]:
        """One matmul for all: consumers add up along N, terms along K."""
        m, n, k, contracts = members[0]
        if self.gathers:
            return m, sum(member[1] for member in members), k, contracts
        return m, n, sum(member[2] for member in members), contracts

    def key(self, strategy: Strategy) -> Key:
        """Return the key of the schedule for `strategy`. ValueError for none, and where strategy and site do not fit."""
        if strategy.mode not in ((Mode.BULK,) if self.bulk else (Mode.PIPELINED, Mode.DIRECT)):
            raise ValueError(f"{strategy} of a {self.kind} site has no schedule")
        if strategy.striped and (self.shard_dim_is_last or self.gathers):
            raise ValueError(f"{strategy}: only a reduction whose shards can be cut is made in stripes; got {self}")
        if strategy.engine_copies and not self.gathers:
            raise ValueError(f"{strategy}: only a gather keeps what has landed; got {self}")
        if strategy.direct and (why := self.why_not_direct):
            raise ValueError(f"{strategy}: {why}; got {self}")
        matmuls = self.computed.own_matmuls
        return Key(
            kind=self.kind,
            ranks=self.ranks,
            chunks=min(strategy.chunks, self.ranks) if self.shard_dim_is_last else strategy.chunks,
            contracts=tuple(m[3] for m in matmuls) if self.gathers else (),
            terms=0 if self.gathers else len(matmuls),
            independent=len(self.matmuls) if self.bulk else self.independent,
            shard_dim_is_last=self.shard_dim_is_last,
            keep=self.keep and self.gathers,
            striped=strategy.striped,
            direct=strategy.direct,
            engine_copies=strategy.engine_copies,
        )
