"""The definition of the ops in symbolic rows: how many rows a region has, and the required value of every row of a result.

Rows are symbols: ``(tag, epoch, "input", rank, shard, row)`` and terms over them, as `interpret.py` builds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .steps import Buf, Key, Region

EMPTY = "never written"
RowAddress = tuple[Buf, int, int, int]
"""A row of a user tensor: buffer, consumer, shard, row."""


def extent(key: Key, rows: Sequence[int], region: Region) -> tuple[int, int]:
    """Return the first and the last row (exclusive) of its shard that a region covers.

    A shard has the rows of the rank that finally owns it. A shard that lands in a scatter phase, or is reduced to the one
    shard of a scatter, is owned by the rank whose memory it is in. The index of a region names the shard where all land.
    The pieces of an all_to_all have rows of their own (`rows_of_piece`).
    """
    if key.is_all_to_all:
        source, destination = (region.rank, region.shard) if region.buf is Buf.INPUT else (region.shard, region.rank)
        count = rows_of_piece(key, rows, source, destination)
        return int(count * region.lo), int(count * region.hi)
    is_scatter = not key.is_gather
    is_reduced = region.buf is Buf.OUTPUT and key.kind.endswith("reduce_scatter")
    is_own = is_reduced or (region.buf is Buf.LANDING and is_scatter)
    is_sharded = region.index < len(key.contracts) and not key.contracts[region.index]
    is_single = region.buf is Buf.RESULT and not is_sharded
    owner = region.index if is_own and key.lands_all_shards else region.rank if is_own else region.shard
    count = 1 if is_single else rows[owner]
    return int(count * region.lo), int(count * region.hi)


def rows_of_piece(key: Key, rows: Sequence[int], source: int, destination: int) -> int:
    """Return the rows of a piece of an all_to_all. `rows`: of all pieces, those of source 0 first, repeated where too few."""
    return rows[(source * key.ranks + destination) % len(rows)]


def product_shard(region: Region) -> int:
    """Return the shard of a product that a matmul writes to `region` of PARTIAL or LANDING.

    The shard number of LANDING names the sender. The shard of the product belongs to the rank whose memory it is in.
    """
    return region.rank if region.buf is Buf.LANDING else region.shard


def expected_rows(
    key: Key, rows: Sequence[int], me: int, stamp: tuple[int, int], memory: Mapping[RowAddress, Any]
) -> Iterator[tuple[RowAddress, Any]]:
    """Yield every row that a call returns on rank `me`, with its value by the op's definition.

    `memory`: the rows that the rank holds. The parts of a contraction may be summed in any order, so a correct sum is yielded
    as it is.
    """
    ranks = range(key.ranks)
    has_products = key.kind.startswith("matmul_")

    def gathered(shard: int, row: int) -> Any:
        return (*stamp, "input", shard, shard, row)

    def total(shard: int, row: int) -> Any:
        if not has_products:
            return ("sum", *((*stamp, "input", rank, shard, row) for rank in ranks))
        return ("sum", *(tuple((*stamp, "term", term, rank, shard, row) for term in range(key.terms)) for rank in ranks))

    if key.is_all_to_all:
        for shard in ranks:
            for row in range(rows_of_piece(key, rows, shard, me)):
                yield (Buf.OUTPUT, 0, shard, row), (*stamp, "input", shard, me, row)
        return
    for shard in ranks:
        for row in range(rows[shard]):
            if key.returns_gathered:
                yield (key.collected_in, 0, shard, row), gathered(shard, row)
            if key.kind.endswith("all_reduce"):
                yield (Buf.OUTPUT, 0, shard, row), total(shard, row)
            if key.kind.endswith("reduce_scatter") and shard == me:
                yield (Buf.OUTPUT, 0, 0, row), total(shard, row)
            for index, contracts in enumerate(key.contracts):
                if not contracts:
                    yield (Buf.RESULT, index, shard, row), ("matmul", index, gathered(shard, row))
    for index in key.independent_indices:
        yield (Buf.RESULT, index, 0, 0), ("matmul", index)
    for index, contracts in enumerate(key.contracts):
        if contracts:
            held = memory.get((Buf.RESULT, index, 0, 0), EMPTY)
            parts = tuple(gathered(shard, row) for shard in ranks for row in range(rows[shard]))
            is_rounded = isinstance(held, tuple) and held[:1] == ("rounded",)
            is_sum = is_rounded and sorted(held[1], key=str) == sorted(parts, key=str)
            # All parts in order: one matmul with the full gathered matrix, which rounds by itself.
            yield (Buf.RESULT, index, 0, 0), held if is_sum or held == parts else ("rounded", parts)
