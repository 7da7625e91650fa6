"""The all_to_all of a graph: rows that ranks exchange, such as tokens and the results of their experts.

    input -> all_to_all_single(input, output_splits, input_splits, group) -> wait -> readers

Rows go to other ranks as they are, so no matmul of this rank is cut by them. An all_to_all is split in two: what is independent
of it runs in between (windows/).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ub_overlap.runtime.fp8.numerics import FLOAT8
from ub_overlap.runtime.schedule.steps import MAX_AREAS_BYTES

from ..graph.aten import aten, dtype_of, shape_of
from ..graph.matmul import FLOATS
from ..graph.sizes import Size, as_size, numel
from ..plan.reasons import Reason
from .collectives import Collective, Op
from .site import Miss

RowCount = int | Node
"""Rows for one rank, or from it: a constant, or a node with a symbolic number."""


def match_all_to_all(c: Collective, _position: dict[Node, int]) -> Miss:
    """Return why no matmul is fused with an all_to_all; a final reason where it cannot be split either."""
    dtype = dtype_of(c.input)
    if dtype not in (*FLOATS, *FLOAT8, torch.uint8):
        name = str(dtype).removeprefix("torch.")
        return Miss(Reason.DTYPE_UNSUPPORTED, f"exchanges {name}, as counts of rows are, which the graph needs at once")
    return Miss(Reason.NO_MATMUL, "exchanged rows are whole: no matmul of this rank runs on their pieces")


def split_args(c: Collective) -> tuple[list[RowCount], list[RowCount]]:
    """Return the (output, input) splits of an all_to_all: rows by rank."""
    assert c.op is Op.ALL_TO_ALL, c
    return list(c.node.args[1]), list(c.node.args[2])  # type: ignore[arg-type]


def split_nodes(c: Collective) -> tuple[Node, ...]:
    """Return the nodes whose numbers an all_to_all needs to start, each once."""
    both = (s for splits in split_args(c) for s in splits)
    return tuple(dict.fromkeys(s for s in both if isinstance(s, Node)))


def host_reads(c: Collective) -> list[Node]:
    """Return the reads of the host that the numbers of rows of an all_to_all are computed from, each once. Others have none."""
    todo, found = list(split_nodes(c)) if c.op is Op.ALL_TO_ALL else [], dict[Node, None]()
    while todo:
        node = todo.pop()
        if node not in found and isinstance(node.meta.get("val"), torch.SymInt):
            found[node] = None
            todo += node.all_input_nodes
    return [node for node in found if node.target is aten._local_scalar_dense.default]


def split_sizes(splits: list[RowCount]) -> list[Size]:
    """Return splits as ints and expressions."""
    return [as_size(s.meta["val"]) if isinstance(s, Node) else s for s in splits]


def is_permute(c: Collective) -> bool:
    """Return whether each rank sends all its rows to one rank and receives as many from one: a step of a ring.

    The numbers are constants, other ones on each rank.
    """
    kinds = [[s for s in split_sizes(splits) if s != 0] for splits in split_args(c)]
    return all(len(sizes) == 1 and isinstance(sizes[0], int) for sizes in kinds) and kinds[0] == kinds[1]


def is_uneven(c: Collective) -> bool:
    """Return whether the splits are constants that are not all equal: then other ranks trace other sizes."""
    sizes = [s for splits in split_args(c) for s in split_sizes(splits)]
    return all(isinstance(s, int) for s in sizes) and len(set(sizes)) > 1


def has_one_round(c: Collective) -> bool:
    """Return whether a step of a ring fits its landing memory; False where its size has no value.

    The finish of one with more rounds waits for those of other ranks, which may have their finishes in another order.
    """
    elements = numel(shape_of(c.input))
    return isinstance(elements, int) and elements * dtype_of(c.input).itemsize <= MAX_AREAS_BYTES


def why_not_split(c: Collective) -> Miss | None:
    """Return why an all_to_all is split on request only, None if it may be split."""
    if is_permute(c):
        if c.hosts > 1 or has_one_round(c):
            return None
        text = f"its rows for one rank exceed the landing memory of an exchange, {MAX_AREAS_BYTES // 2**20} MiB"
        return Miss(Reason.MEMORY, f"{text}; use a ring that gathers")
    if is_uneven(c):
        return Miss(Reason.UNEVEN_SHARDS, "its parts are uneven constants, so other ranks may trace other sizes")
    return None


def finishes_together(c: Collective) -> bool:
    """Return whether the finish of `c`, if it is split, waits for the finishes of other ranks.

    An all_reduce sends its sums there, and an all_to_all its further rounds. A step of a ring has one round, unless a user
    requests to split a larger one.
    """
    if c.hosts > 1:  # c10d runs the whole collective between start and finish
        return False
    return c.op is Op.ALL_REDUCE or (c.op is Op.ALL_TO_ALL and not (is_permute(c) and has_one_round(c)))
