"""What the finders hand on: a match (how a collective and its matmuls can become one op) or a miss (why not)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..graph.aten import Blocks
from ..graph.matmul import Matmul, Operand, Scales
from ..graph.sizes import Size
from ..plan.reasons import Reason
from .collectives import Collective
from .permutes import Permute


@dataclass(frozen=True, slots=True)
class Miss:
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Consumer:
    """A matmul with the gathered matrix G [rows, cols] as one operand; B is `operand`, the other one.

    transpose_gathered   transpose_out   the compute's value
    False                False           G @ B
    False                True            (G @ B)^T
    True                 False           G^T @ B
    True                 True            (G^T @ B)^T
    """

    compute: Matmul
    transpose_gathered: bool
    transpose_out: bool
    operand: Operand

    def contracts_shard_dim(self, shard_dim_is_last: bool) -> bool:
        """Whether the matmul sums over the dim that is sharded."""
        return self.transpose_gathered != shard_dim_is_last


@dataclass(frozen=True, slots=True)
class Gather:
    """all_gather -> matmuls. G [rows, cols] is the gathered matrix; with `last` its columns are dealt out, else its rows.

    `aliases`: nodes that carry G's elements, mapped to how. `roots`: aliases that others use too, so that their values must
    survive. `dtype`: what travels. A narrowing cast between gather and matmul moves before the gather; after a widening one
    the op multiplies in the operands' type, casting pieces as they arrive.
    """

    collective: Collective
    blocks: Blocks
    rows: Size
    cols: Size
    shard_dim_is_last: bool
    dtype: torch.dtype
    consumers: tuple[Consumer, ...]
    aliases: dict[Node, GatheredAlias]
    kept_aliases: tuple[Node, ...]
    permutes: tuple[Permute, ...]
    """Permutes between the wait and the matmuls: the shard goes through them before it travels."""
    cuts: tuple[Node, ...]
    """Splits, getitems and slices between two aliases, read by nobody else."""
    scales: GatheredScales | None = None
    """Of float8 rows with a scale each."""

    @property
    def scaled(self) -> Scales | None:
        """Of float8 shards: what the first consumer is scaled by; its left scale is that of all."""
        return self.consumers[0].compute.scales

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        return tuple(k.compute for k in self.consumers)

    @property
    def members(self) -> list[Node]:
        beside = self.scales.members if self.scales else []
        return [self.collective.node, *self.aliases, *self.cuts, *(c.compute.node for c in self.consumers), *beside]


@dataclass(frozen=True, slots=True)
class GatheredScales:
    """The all_gather of row scales that goes along with that of the rows. `aliases`, `roots`, `cuts`: as in `Gather`."""

    collective: Collective
    blocks: Blocks
    aliases: dict[Node, GatheredAlias]
    kept_aliases: tuple[Node, ...]
    cuts: tuple[Node, ...]

    @property
    def members(self) -> list[Node]:
        return [self.collective.node, *self.aliases, *self.cuts]


@dataclass(frozen=True, slots=True)
class GatheredAlias:
    """A node that holds gathered elements: in row-major order they are `blocks`; `swapped` means of the transposed matrix
    `matrix` [a, b] (the node's own squeezed shape is (b, a))."""

    blocks: Blocks
    dtype: torch.dtype
    matrix: tuple[Size, ...] = ()
    permutes: tuple[Permute, ...] = ()
    """Permutes that the elements went through since the wait."""

    @property
    def swapped(self) -> bool:
        return bool(self.matrix)


@dataclass(frozen=True, slots=True)
class Reduction:
    """sum of products (+ addends) -> reduce_scatter or all_reduce. partial [rows, cols] in the collective's row-major order.

    `addends`: (node, swapped) of as many elements, added before the reduction; swapped ones hold the transposed matrix in their
    own squeezed shape. `biases`: rows [cols] added to every row. `after`: (op, constant) pairs to apply
    to the result, in order. `root`: the node whose value is `partial` (transposed where `root_swapped`); `spine`: the nodes
    between it and the collective. `kept_nodes`: root and spine nodes that others read too.
    """

    collective: Collective
    blocks: Blocks
    rows: Size
    cols: Size
    shard_dim_is_last: bool
    terms: tuple[Matmul, ...]
    addends: tuple[tuple[Node, bool], ...]
    biases: tuple[Node, ...]
    after: tuple[tuple[object, object], ...]
    inner: tuple[Node, ...]
    root: Node
    root_swapped: bool
    view_chain: tuple[Node, ...]
    permutes: tuple[Permute, ...]
    """Permutes between the sum and the collective: the result goes through them, in this order."""
    kept_nodes: tuple[Node, ...]

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        return self.terms

    @property
    def members(self) -> list[Node]:
        wait = [self.collective.wait] if self.collective.wait else []
        return [*(t.node for t in self.terms), *self.inner, *self.view_chain, self.collective.node, *wait]


@dataclass(frozen=True, slots=True)
class Bulk:
    """A collective beside products that neither need it nor feed it."""

    collective: Collective
    matmuls: tuple[Matmul, ...]

    @property
    def members(self) -> list[Node]:
        assert self.collective.wait is not None
        return [self.collective.node, self.collective.wait, *(p.node for p in self.matmuls)]


Site = Gather | Reduction | Bulk


@dataclass(slots=True)
class Candidate:
    """One collective of the graph and everything that could be done with it."""

    collective: Collective
    match: Gather | Reduction | None = None
    miss: Miss | None = None
    independent_matmuls: tuple[Matmul, ...] = field(default_factory=tuple)
    """Independent products, nearest first."""
    carrier: int | None = None
    """Of a gather of row scales: the number of the candidate whose rows they are."""
