"""One random call from a seed and a number: op, sizes, dtypes, strides, strategy, delays.

The ranks of a group draw the same structure and different values. A call depends on its number only, not on earlier calls, so
any call can be replayed alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.cases import BF16, BOTH_T, E4M3, E5M2, F16, F32, GATHERED_T, OUT_T, PLAIN, Case, Maker
from tests.gpu.split_cases import coalesced, exchange, split

SPLIT = ("split", "coalesced", "exchange")
"""Of two ops: others of the group run between their start and their finish."""
OPS = ("gather", "scatter", "reduce", "bulk", "scaled_gather", "scaled_scatter", "fused", *SPLIT)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
LARGE_PIECE = 2 << 20
"""Bytes. A split slot has more memory for such pieces than any other call needs, so it soon grows no further."""
SITES = 4
"""Sites per op. A bounded number: statistics keep a row per site. Also the split slots: each site has its own."""


@dataclass(frozen=True)
class RandomCall:
    """A call of this rank. `step_delay_us`: largest random delay before each step. `late_s`: sleep of this rank before it.

    `calls_between`: of a split collective, how many later calls run before its finish; fewer than SITES.
    """

    name: str
    case: Case
    strategy: str
    site: str
    step_delay_us: int
    late_s: float
    calls_between: int = 0


def draw_call(seed: int, number: int, rank: int, ranks: int) -> RandomCall:
    """Return call `number` of the soak `seed` on `rank`."""
    rng = random.Random(f"{seed}/{number}")
    torch.manual_seed((seed * 1_000_003 + number) * 64 + rank)
    op = rng.choice(OPS)
    make = Maker(torch.device("cpu"), ranks)
    case = getattr(_Draw(rng, make, rank, number % SITES), op)()
    strategy = _draw_fused_strategy(rng, case) if op == "fused" else _draw_strategy(rng, op, ranks)
    if op in ("gather", "scatter", "reduce", "bulk", *SPLIT):
        case = (case[0], _restride(rng, case[1]))
    calls_between = rng.randrange(SITES) if op in SPLIT else 0
    sleeper = rng.randrange(ranks) if rng.random() < 0.15 else -1
    return RandomCall(
        name=f"call {number}: {case[0]} {strategy} on {_sizes(case[1])}",
        case=case,
        strategy=strategy,
        site=f"/soak.{op}.{number % SITES}",
        step_delay_us=rng.choice((0, 0, 0, 300, 2000)),
        calls_between=calls_between,
        late_s=rng.random() * 0.02 if rank == sleeper else 0.0,  # the last draw: only one rank makes it
    )


class _Draw:
    """Draws the arguments of one op. One call in twelve is large: it makes the arena grow, once for the largest."""

    def __init__(self, rng: random.Random, make: Maker, rank: int, split_slot: int) -> None:
        self.rng, self.make, self.rank, self.split_slot = rng, make, rank, split_slot
        self.rows = rng.randrange(200, 700) if rng.random() < 1 / 12 else rng.randrange(0, 40)
        self.cols = rng.randrange(1, 70)
        self.dtype = rng.choice((F32, BF16, F16))

    def gather(self) -> Case:
        last = self.rng.random() < 0.3
        transposes = self.rng.choice(([PLAIN], [PLAIN, GATHERED_T], [OUT_T, BOTH_T], [PLAIN, PLAIN, OUT_T]))
        outer, keep, n = self.rng.randrange(1, 4), self.rng.random() < 0.5, self.rng.randrange(1, 40)
        return self.make.gather(self.dtype, outer, self.rows, self.cols, transposes, last, keep, n)

    def scatter(self) -> Case:
        rng = self.rng
        return self.make.scatter(
            self.dtype, rng.randrange(1, 4), self.rows, self.cols, last=rng.random() < 0.3,
            depths=rng.choice(([17], [8, 5], [33, 1, 4])), bias=rng.random() < 0.4, out_dtype=rng.choice((self.dtype, F32)),
            keep=rng.random() < 0.4, by=rng.choice(("sum", "avg")),
        )  # fmt: skip

    def reduce(self) -> Case:
        rng = self.rng
        return self.make.reduce(
            self.dtype, self.rows, self.cols, rng.randrange(1, 50), rng.choice(("sum", "avg")), rng.random() < 0.5
        )

    def bulk(self) -> Case:
        collective = self.rng.choice(COLLECTIVES)
        rows = self.rows * (self.make.ranks if collective == "reduce_scatter" else 1)
        out_dtype = self.dtype if collective == "all_gather" else self.rng.choice((self.dtype, F32))
        return self.make.bulk(self.dtype, collective, rows, self.cols, self.rng.choice(("sum", "avg")), out_dtype)

    def split(self) -> Case:
        rng, collective = self.rng, self.rng.choice(COLLECTIVES)
        rows = self.rows * (self.make.ranks if collective == "reduce_scatter" else 1)
        by, other, zero_copy = rng.choice(("sum", "avg")), rng.choice((self.dtype, F32)), rng.random() < 0.5
        x, is_gather = self.make.randn(rows, self.cols, dtype=self.dtype), collective == "all_gather"
        return split(x, collective, by, self.dtype if is_gather else other, self.split_slot, is_gather and zero_copy)

    def coalesced(self) -> Case:
        """One to five tensors of other sizes and dtypes, some empty."""
        rng, collective = self.rng, self.rng.choice(COLLECTIVES)
        unit, tensors, dtypes = self.make.ranks if collective == "reduce_scatter" else 1, [], []
        for _ in range(rng.randrange(1, 6)):
            dtype, rows = rng.choice((F32, BF16, F16)), rng.choice((0, 1, self.rows))
            tensors.append(self.make.randn(rows * unit, rng.randrange(1, 70), dtype=dtype))
            dtypes.append(dtype if collective == "all_gather" else rng.choice((dtype, F32)))
        zero_copy = collective == "all_gather" and rng.random() < 0.5
        return coalesced(tensors, collective, rng.choice(("sum", "avg")), dtypes, self.split_slot, zero_copy)

    def exchange(self) -> Case:
        """Uneven and empty pieces. Large ones, of one size, take rounds until the areas have grown."""
        rng, ranks = self.rng, range(self.make.ranks)
        large = LARGE_PIECE // (self.cols * self.dtype.itemsize) if rng.random() < 1 / 12 else self.rows
        rows = [[rng.choice((0, 1, self.rows, large)) for _ in ranks] for _ in ranks]
        mine, one_area = rows[self.rank], rng.random() < 0.3
        theirs = [rows[source][self.rank] for source in ranks]
        if one_area:  # a step of a ring
            step, many = rng.randrange(len(ranks)), rng.choice((self.rows, large))
            mine = [many if to == (self.rank + step) % len(ranks) else 0 for to in ranks]
            theirs = [many if source == (self.rank - step) % len(ranks) else 0 for source in ranks]
        x = self.make.randn(sum(mine), self.cols, dtype=self.dtype)
        return exchange(x, theirs, mine, self.split_slot, one_area)

    def fused(self) -> Case:
        """Rows of at least 16 bytes, which a vector has."""
        rng, collective = self.rng, self.rng.choice(("all_reduce", "all_reduce", "reduce_scatter", "all_gather"))
        norm = "none" if collective == "all_gather" else rng.choice(("none", "rms", "layer"))
        residual, weight, rounded, by_row, round_sum, divides = (rng.random() < 0.5 for _ in range(6))
        scale = rng.choice((None, None, E4M3, E5M2)) if norm != "none" else None
        cols = 8 * rng.randrange(1, 40)
        return self.make.fused(
            self.dtype, max(1, self.rows), cols, collective, norm, rng.choice(("sum", "avg")),
            residual and collective != "all_gather", weight, rounded, scale, by_row, round_sum, divides,
        )  # fmt: skip

    def scaled_gather(self) -> Case:
        rng = self.rng
        return self.make.scaled_gather(
            rng.choice((BF16, F32)), rng.randrange(1, 4), self.rows, 16 * rng.randrange(1, 5), rng.random() < 0.5,
            keep=rng.random() < 0.5, widths=rng.choice(([16], [48, 32])), bias=rng.random() < 0.5,
            types=rng.choice(((E4M3, E4M3), (E5M2, E4M3))),
        )  # fmt: skip

    def scaled_scatter(self) -> Case:
        rng = self.rng
        return self.make.scaled_scatter(
            rng.choice((BF16, F32)), rng.randrange(1, 4), self.rows, 128 * rng.randrange(1, 3), rng.random() < 0.5,
            depths=rng.choice(([32], [16, 48])), bias=rng.random() < 0.5, by=rng.choice(("sum", "avg")),
            wire=rng.choice(("plain", "float8")), types=rng.choice(((E4M3, E4M3), (E5M2, E4M3))),
        )  # fmt: skip


def _draw_strategy(rng: random.Random, op: str, ranks: int) -> str:
    if op == "exchange":
        return "bulk"
    if op in ("bulk", "split", "coalesced"):
        return rng.choice(("bulk", f"bulk:chunks={2 * ranks}"))
    options = ["pipelined", f"pipelined:chunks={2 * ranks}"]
    if op in ("scatter", "reduce", "scaled_scatter"):
        options += [f"pipelined:stripes={ranks + 1}", "direct"]
    if op in ("gather", "scaled_gather"):
        options += ["pipelined:copies=engine"]
    return rng.choice(options)


def _draw_fused_strategy(rng: random.Random, case: Case) -> str:
    return rng.choice(("one_shot", "two_shot", "none") if case[1][1] == "all_reduce" else ("one_shot", "none"))


def _restride(rng: random.Random, value: Any) -> Any:
    """Return the same values with other strides and storage offsets."""
    if isinstance(value, tuple | list):
        return type(value)(_restride(rng, item) for item in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or rng.random() < 0.5:
        return value
    if rng.random() < 0.5:  # the last two dims transposed in memory
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    wide = value.new_empty(*value.shape[:-1], value.shape[-1] + 3)  # rows with gaps
    view = wide[..., 2 : 2 + value.shape[-1]]
    return view.copy_(value)


def _sizes(arguments: tuple[Any, ...]) -> str:
    """Describe tensors and other arguments of a case, as an error prints them."""

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"[{', '.join(map(text, value))}]" if isinstance(value, list | tuple) else str(value).removeprefix("torch.")

    return ", ".join(map(text, arguments))
