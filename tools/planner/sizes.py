"""Sizes of the blocks that can be planned. Imports no torch, so that bad sizes are an error at once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ub_overlap.runtime.errors import OptionError

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBlock:
    """Sizes of a block. `gated`: SwiGLU, RMSNorm, rotary positions, no biases (Llama); else GELU, LayerNorm, biases (GPT).

    `dp`: ranks that share each weight, gather it where it is used and reduce its gradient (ZeRO-3); `seq` and `batch` are of
    one of them. The ranks of tensor parallelism are next to each other, then those of a host.

    `pp`: ranks of a pipeline, each with `virtual` stages of `layers` blocks. A step has `microbatches` of `batch` sequences.
    The ranks of a stage are next to each other.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    seq: int
    tp: int
    batch: int = 1
    layers: int = 1
    dtype: str = "bf16"
    gated: bool = True
    dp: int = 1
    ranks_per_host: int = 8
    pp: int = 1
    virtual: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type == "int"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _refused(name, value, "an integer of at least 1")
        if self.ranks < 2:
            raise _refused("tp", self.tp, "at least 2 ranks, here or in --dp: one rank has no communication")
        if self.hosts > 1 and self.ranks % self.ranks_per_host:
            raise _refused("ranks_per_host", self.ranks_per_host, f"a divisor of all ranks, pp * tp * dp = {self.ranks}")
        if self.stage_ranks > self.ranks_per_host and self.stage_ranks % self.ranks_per_host:
            raise _refused("ranks_per_host", self.ranks_per_host, f"a divisor of a stage's ranks, tp * dp = {self.stage_ranks}")
        for name in ("virtual", "microbatches") if self.pp == 1 else ():
            if getattr(self, name) != 1:
                raise _refused(name, getattr(self, name), "1 without --pp")
        if self.dtype not in DTYPES:
            raise _refused("dtype", self.dtype, " or ".join(DTYPES))
        if self.hidden % self.heads:
            raise _refused("hidden", self.hidden, f"a multiple of heads={self.heads}")
        if self.gated and self.hidden // self.heads % 2:
            raise _refused("hidden", self.hidden, "heads of an even size, for rotary positions")
        if self.heads % self.kv_heads:
            raise _refused("heads", self.heads, f"a multiple of kv_heads={self.kv_heads}")
        for name in ("ffn", "heads", "kv_heads", "seq"):
            if getattr(self, name) % self.tp:
                raise _refused(name, getattr(self, name), f"a multiple of tp={self.tp}")
        for name, rows in (("hidden", self.hidden), ("ffn", self.ffn // self.tp), ("kv_heads", self.kv_rows)):
            if rows % self.dp:
                raise _refused(name, getattr(self, name), f"a weight whose {rows} rows on a rank divide by dp={self.dp}")

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """Ranks that share a stage."""
        return self.tp * self.dp

    def host_of_stage(self, rank: int) -> int:
        """Return the host of the first rank that has the stages of rank `rank` of the pipeline."""
        return rank * self.stage_ranks // self.ranks_per_host

    @property
    def hosts(self) -> int:
        """Hosts of all ranks."""
        return -(-self.ranks // self.ranks_per_host)

    @property
    def kv_rows(self) -> int:
        """Rows of the weight of keys on one rank of tensor parallelism."""
        return self.kv_heads * self.head_dim // self.tp

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads


def _refused(name: str, got: Any, expected: str) -> OptionError:
    return OptionError(
        what=f"cannot plan this block: {name}", where=f"--{name.replace('_', '-')}", got=str(got), expected=expected
    )


MODELS = {
    "llama-8b": PlannedBlock(hidden=4096, ffn=14336, heads=32, kv_heads=8, seq=8192, tp=8),
    "llama-70b": PlannedBlock(hidden=8192, ffn=28672, heads=64, kv_heads=8, seq=8192, tp=8),
    "gpt3-175b": PlannedBlock(hidden=12288, ffn=49152, heads=96, kv_heads=96, seq=2048, tp=8, gated=False),
}


def named(name: str, **changes: Any) -> PlannedBlock:
    """Return the sizes of a known model, with changes. OptionError for another name."""
    if name not in MODELS:
        raise OptionError(what="unknown model", where="--model", got=name, expected=f"one of {', '.join(MODELS)}")
    return replace(MODELS[name], **changes)
