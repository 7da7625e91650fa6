"""Keys that the schedule tests share."""

from __future__ import annotations

from collections.abc import Iterator

from ub_overlap.runtime.schedule import Key


def keys(ranks: int, chunks: int) -> Iterator[Key]:
    """Return at least one key of every kind."""
    yield Key("all_gather_matmul", ranks, chunks, contracts=(False,))
    yield Key("all_gather_matmul", ranks, chunks, contracts=(True, False, True), keep=True)
    yield Key("all_gather_matmul", ranks, chunks, contracts=(True, True))
    yield Key("all_gather_matmul", ranks, chunks, keep=True)
    yield Key("all_gather_matmul", ranks, chunks, contracts=(False, True), independent=2)
    yield Key("all_gather_matmul", ranks, chunks, contracts=(False, True), keep=True, engine_copies=True)
    yield Key("all_gather_matmul", ranks, chunks, contracts=(True,), keep=True, engine_copies=True)
    for kind in ("matmul_reduce_scatter", "matmul_all_reduce"):
        yield Key(kind, ranks, chunks, terms=1)
        yield Key(kind, ranks, chunks, terms=2, keep=True)
        if chunks <= 8:  # of every shard
            yield Key(kind, ranks, chunks, terms=2, striped=True)
        if ranks > 1:
            yield Key(kind, ranks, terms=1, direct=True)
            yield Key(kind, ranks, terms=1, independent=1, direct=True)
        yield Key(kind, ranks, chunks, terms=1, independent=2)
    for kind in ("bulk_all_gather", "bulk_reduce_scatter", "bulk_all_reduce"):
        yield Key(kind, ranks, chunks)
        yield Key(kind, ranks, chunks, independent=2)
    yield Key("split_all_gather", ranks, chunks, zero_copy=True)
    for kind in ("split_all_gather", "split_reduce_scatter", "split_all_reduce"):
        yield Key(kind, ranks, chunks)
    if 0 < chunks <= 4:  # rounds
        yield Key("split_all_to_all", ranks, chunks)


def chunk_counts(ranks: int) -> list[int]:
    """Return chunk counts below, equal to and above the number of ranks, multiples and others."""
    return sorted({0, 1, 2, ranks // 2, max(1, ranks - 1), ranks, ranks + 1, 2 * ranks, 3 * ranks - 1, 4 * ranks})
