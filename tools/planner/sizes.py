"""Sizes of the blocks that can be planned. Imports no torch, so that bad sizes are an error at once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ub_overlap.runtime.errors import OptionError

DTYPES = ("bf16", "fp16", "fp32")
CP_FORMS = ("gathered", "ring", "ring_all_to_all", "ulysses")
"""Forms of context parallelism (context_attention.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBlock:
    """Sizes of a block. `gated`: SwiGLU, RMSNorm, rotary positions, no biases (Llama); else GELU, LayerNorm, biases (GPT).

    `dp`: ranks that share each weight, gather it where it is used and reduce its gradient (ZeRO-3); `seq` and `batch` are of
    one of them. The ranks of tensor parallelism are next to each other, then those of a host.

    `cp`: ranks that share each sequence, of which each has a part between those of tensor parallelism. `cp_form`: how queries
    reach all keys (context_attention.py). Weights are sharded over dp * cp ranks where `dp` is above 1.

    `pp`: ranks of a pipeline, each with `virtual` stages of `layers` blocks. A step has `microbatches` of `batch` sequences.
    The ranks of a stage are next to each other.

    `experts`: 1 for a dense feed-forward layer; else `ffn` is the width of an expert, each token goes to `experts_per_token`,
    and all go through a dense layer of width `shared_ffn`, if any. `ep`: ranks that share the experts, next to each other; they
    are ranks of tensor, context and data parallelism. Other ranks of those have the same experts, and shard their weights.
    `halves`: the experts get the tokens in two halves, one exchanged while the other one is computed.
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
    ep: int = 1
    experts: int = 1
    experts_per_token: int = 1
    shared_ffn: int = 0
    halves: bool = False
    cp: int = 1
    cp_form: str = "gathered"

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type == "int"):
            value = getattr(self, name)
            least = 0 if name == "shared_ffn" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _refused(name, value, f"an integer of at least {least}")
        if self.ranks < 2:
            raise _refused("tp", self.tp, "at least 2 ranks, here, in --cp or in --dp: one rank has no communication")
        if self.hosts > 1 and self.ranks % self.ranks_per_host:
            raise _refused("ranks_per_host", self.ranks_per_host, f"a divisor of all ranks, pp * tp * cp * dp = {self.ranks}")
        if self.stage_ranks > self.ranks_per_host and self.stage_ranks % self.ranks_per_host:
            raise _refused(
                "ranks_per_host", self.ranks_per_host, f"a divisor of a stage's ranks, tp * cp * dp = {self.stage_ranks}"
            )
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
        for name in (self.dense_width, "heads", "kv_heads", "seq"):
            if getattr(self, name) % self.tp:
                raise _refused(name, getattr(self, name), f"a multiple of tp={self.tp}")
        for name, rows in (("hidden", self.hidden), (self.dense_width, self.dense_ffn // self.tp), ("kv_heads", self.kv_rows)):
            if rows % self.weight_ranks:
                ranks = "dp * cp" if self.cp > 1 else "dp"
                expected = f"a weight whose {rows} rows on a rank divide by {ranks}={self.weight_ranks}"
                raise _refused(name, getattr(self, name), expected)
        self._check_context()
        self._check_experts()

    def _check_context(self) -> None:
        if self.cp == 1:
            return
        if self.cp_form not in CP_FORMS:
            raise _refused("cp_form", self.cp_form, " or ".join(CP_FORMS))
        if why := self.why_not_form(self.cp_form):
            raise _refused("cp", self.cp, why)

    def _check_experts(self) -> None:
        if self.experts == 1:
            for name, least in (("ep", 1), ("experts_per_token", 1), ("shared_ffn", 0), ("halves", False)):
                if getattr(self, name) != least:
                    raise _refused(name, getattr(self, name), f"{least} without --experts")
            return
        if self.dtype != "bf16":
            raise _refused("dtype", self.dtype, "bf16 with --experts: grouped matmuls take no other type")
        if self.stage_ranks % self.ep or self.ep % self.tp:
            expected = f"a divisor of tp * cp * dp = {self.stage_ranks}, and a multiple of tp={self.tp}"
            raise _refused("ep", self.ep, expected)
        if self.experts % self.ep or self.experts_per_token > self.experts:
            expected = f"a multiple of ep={self.ep}, and at least experts_per_token={self.experts_per_token}"
            raise _refused("experts", self.experts, expected)
        if self.expert_rows % self.ep:
            raise _refused("seq", self.seq, f"a rank's {self.expert_rows} rows for experts to divide by ep={self.ep}")
        if self.halves and not self.may_halve:
            raise _refused("seq", self.seq, f"tokens of a rank whose halves have rows that divide by ep={self.ep}")
        for name in ("hidden", "ffn"):
            if getattr(self, name) % 8 or self.experts // self.ep * getattr(self, name) % self.expert_replicas:
                expected = f"a multiple of 8 whose rows in all experts of a rank divide by {self.expert_replicas} ranks"
                raise _refused(name, getattr(self, name), expected)

    @property
    def expert_rows(self) -> int:
        """Rows that a rank sends to experts."""
        return self.batch * self.seq // (self.tp * self.cp) * self.experts_per_token

    @property
    def may_halve(self) -> bool:
        """Whether the rows of half of a rank's tokens divide by the ranks that exchange them."""
        cut = self.batch if self.batch > 1 else self.seq // (self.tp * self.cp)
        return self.ep > 1 and cut % 2 == 0 and self.expert_rows // 2 % self.ep == 0

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """Ranks that share a stage."""
        return self.tp * self.cp * self.dp

    @property
    def weight_ranks(self) -> int:
        """Ranks over which each weight of a rank of tensor parallelism is sharded."""
        return self.dp * self.cp if self.dp > 1 else 1

    def why_not_form(self, form: str) -> str:
        """Return what a form of context parallelism needs that the block has not, "" if it can run."""
        if self.seq % (2 * self.cp * self.tp):
            return f"a sequence of two parts for each rank: {self.seq} is no multiple of 2 * cp * tp"
        if form == "ulysses" and self.heads // self.tp % self.cp:
            return f"a divisor of the {self.heads // self.tp} heads of a rank of tensor parallelism, for {form}"
        return ""

    def host_of_stage(self, rank: int) -> int:
        """Return the host of the first rank that has the stages of rank `rank` of the pipeline."""
        return rank * self.stage_ranks // self.ranks_per_host

    @property
    def hosts(self) -> int:
        """Hosts of all ranks."""
        return -(-self.ranks // self.ranks_per_host)

    @property
    def dense_width(self) -> str:
        """The name of the width of the dense feed-forward layer."""
        return "ffn" if self.experts == 1 else "shared_ffn"

    @property
    def dense_ffn(self) -> int:
        """Width of the dense feed-forward layer, 0 without one."""
        return getattr(self, self.dense_width)

    @property
    def expert_replicas(self) -> int:
        """Ranks that have the same experts."""
        return self.stage_ranks // self.ep if self.experts > 1 else 1

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
    "mixtral-8x7b": PlannedBlock(
        hidden=4096, ffn=14336, heads=32, kv_heads=8, seq=8192, tp=1, dp=8, ep=8, experts=8, experts_per_token=2
    ),
}


def named(name: str, **changes: Any) -> PlannedBlock:
    """Return the sizes of a known model, with changes. OptionError for another name."""
    if name not in MODELS:
        raise OptionError(what="unknown model", where="--model", got=name, expected=f"one of {', '.join(MODELS)}")
    return replace(MODELS[name], **changes)
