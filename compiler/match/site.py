"""Records of matching: a site (a collective and matmuls that can become one op) or a miss (why there is none)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..graph.aten import DIVISIONS, Scaling, ShardBlocks
from ..graph.matmul import Matmul, Operand, Scales
from ..graph.sizes import Size
from ..plan.reasons import Reason
from .branch import Branch
from .collectives import Collective
from .float8_cast import Float8Cast
from .norm import Norm
from .permutes import Permute


def scale_of(scalings: Sequence[Scaling]) -> float:
    """Return the constant of all scalings together."""
    scale = 1.0
    for target, constant in scalings:
        scale = scale / constant if target in DIVISIONS else scale * constant
    return scale


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason why a collective has no site, and its detail."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Consumer:
    """A matmul with the gathered matrix G [rows, cols] as one operand; B is `operand`, the other one.

        transpose_gathered   transpose_out   value of `compute`
        False                False           G @ B
        False                True            (G @ B)^T
        True                 False           G^T @ B
        True                 True            (G^T @ B)^T

    A consumer of another kind than a matmul brings its own type of `compute`, distinguished by `compute.kind`.
    """

    compute: Matmul
    transpose_gathered: bool
    transpose_out: bool
    operand: Operand

    def contracts_shard_dim(self, shard_dim_is_last: bool) -> bool:
        """Return whether the matmul sums over the dim that is sharded."""
        return self.transpose_gathered != shard_dim_is_last


@dataclass(frozen=True, slots=True)
class Gather:
    """all_gather -> matmuls. G [rows, cols] is the gathered matrix.

    A narrowing cast between gather and matmul moves before the gather. After a widening cast the op multiplies in the
    type of the operands, and casts pieces as they arrive.
    """

    collective: Collective
    blocks: ShardBlocks
    """The layout of the shards in G."""
    rows: Size
    cols: Size
    shard_dim_is_last: bool
    """Whether the columns of G are sharded; else its rows are."""
    dtype: torch.dtype
    """The type on the wire."""
    consumers: tuple[Consumer, ...]
    aliases: dict[Node, GatheredAlias]
    """Nodes that hold the elements of G, and their layouts."""
    kept_aliases: tuple[Node, ...]
    """Aliases with readers outside of the site: their values must survive the rewrite."""
    permutes: tuple[Permute, ...]
    """Permutes between the wait and the matmuls. The op's shard is permuted before it is sent."""
    cuts: tuple[Node, ...]
    """Splits, getitems and slices between two aliases, without other readers."""
    scales: GatheredScales | None = None
    """The gather of the scales of float8 rows."""
    packs: tuple[int, ...] = ()
    """Numbers of neighboring consumers that become one matmul (pack_groups.py), e.g. (3, 1). Empty: each is one."""
    pack_copies: tuple[str, ...] = ()
    """The operands that each of `packs` copies together: "", "lhs", "rhs" or "lhs+rhs"."""
    independent: tuple[Matmul, ...] = ()
    """Matmuls that neither read nor feed the collective, and run while shards are on their way."""

    @property
    def scaled(self) -> Scales | None:
        """The scales of the first consumer of float8 shards. All consumers share its left scale."""
        return self.consumers[0].compute.scales

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        """The consumers' matmuls, then the independent ones."""
        return (*(k.compute for k in self.consumers), *self.independent)

    @property
    def members(self) -> list[Node]:
        """The nodes that the site replaces."""
        scales = self.scales.members if self.scales else []
        return [self.collective.node, *self.aliases, *self.cuts, *(p.node for p in self.matmuls), *scales]


@dataclass(frozen=True, slots=True)
class GatheredScales:
    """The all_gather of row scales that accompanies the gather of the rows. Fields as in `Gather`."""

    collective: Collective
    blocks: ShardBlocks
    aliases: dict[Node, GatheredAlias]
    kept_aliases: tuple[Node, ...]
    cuts: tuple[Node, ...]

    @property
    def members(self) -> list[Node]:
        """The nodes that the site replaces."""
        return [self.collective.node, *self.aliases, *self.cuts]


@dataclass(frozen=True, slots=True)
class GatheredAlias:
    """The layout of a node that holds gathered elements.

    In row-major order the elements are `blocks`. For a transposed alias, `blocks` are those of `matrix` [a, b], and the
    node's own squeezed shape is (b, a).
    """

    blocks: ShardBlocks
    dtype: torch.dtype
    matrix: tuple[Size, ...] = ()
    permutes: tuple[Permute, ...] = ()
    """Permutes between the wait and the node."""

    @property
    def is_transposed(self) -> bool:
        """Whether the node holds the transpose of `matrix`."""
        return bool(self.matrix)


@dataclass(frozen=True, slots=True)
class Addend:
    """A summand that is no matmul: `value` times `factor`, broadcast to `shape`.

    It is a rank's own business: other ranks may add something else, or nothing. A sum with an addend is matched, chosen and
    run like the same sum without it.
    """

    value: Node | float
    """A node (a tensor, or a symbolic number) or a constant."""
    shape: tuple[Size, ...]
    """The shape of the sum at the addition."""
    is_transposed: bool
    """Whether the sum there is the transpose of the matrix that is reduced."""
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Reduction:
    """Sum of matmuls (+ addends) -> reduce_scatter or all_reduce.

    The sum [rows, cols] is in the row-major order of the collective's input.
    """

    collective: Collective
    blocks: ShardBlocks
    """The layout of the shards in the sum."""
    rows: Size
    cols: Size
    shard_dim_is_last: bool
    """Whether the columns of the sum are scattered; else its rows are."""
    terms: tuple[Matmul, ...]
    addends: tuple[Addend, ...]
    """What this rank adds to the matmuls, before the reduction."""
    scalings: tuple[Scaling, ...]
    """(op, constant) pairs that are applied to the result, in this order. None where their scale is 1."""
    inner: tuple[Node, ...]
    """Nodes of the sum between the terms and the root."""
    root: Node
    """The node whose value is the sum."""
    root_is_transposed: bool
    """Whether the root holds the transposed sum."""
    view_chain: tuple[Node, ...]
    """The nodes between the root and the collective."""
    permutes: tuple[Permute, ...]
    """Permutes between the sum and the collective. They are applied to the op's result, in this order."""
    kept_nodes: tuple[Node, ...]
    """The root and nodes of the view chain with readers outside of the site: their values must survive the rewrite."""
    packs: tuple[int, ...] = ()
    """Numbers of neighboring terms that become one matmul (pack_groups.py), e.g. (3, 1). Empty: each is one."""
    pack_copies: tuple[str, ...] = ()
    """The operands that each of `packs` copies together: "", "lhs", "rhs" or "lhs+rhs"."""
    independent: tuple[Matmul, ...] = ()
    """Matmuls that neither read nor feed the collective, and run while shards are on their way."""

    @property
    def scale(self) -> float:
        """The constant of all scalings together."""
        return scale_of(self.scalings)

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        """The matmuls of the sum, then the independent ones."""
        return (*self.terms, *self.independent)

    @property
    def members(self) -> list[Node]:
        """The nodes that the site replaces."""
        wait = [self.collective.wait] if self.collective.wait else []
        return [*(p.node for p in self.matmuls), *self.inner, *self.view_chain, self.collective.node, *wait]


@dataclass(frozen=True, slots=True)
class Bulk:
    """A collective and matmuls that are independent of it. It sends what a widening cast in front of it reads."""

    collective: Collective
    matmuls: tuple[Matmul, ...]

    @property
    def independent(self) -> tuple[Matmul, ...]:
        """All matmuls: they neither read nor feed the collective."""
        return self.matmuls

    @property
    def members(self) -> list[Node]:
        """The nodes that the site replaces."""
        c = self.collective
        assert c.wait is not None
        return [*(c.widening.nodes if c.widening else ()), c.node, c.wait, *(p.node for p in self.matmuls)]


FIRST_HALF = ".first"
"""The end of the first half's name, behind that of its site: in a rewritten graph, in statistics and in errors."""


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a hierarchical collective: the collective over the ranks of one host, or over one rank of each host."""

    group: str
    ranks: int
    is_across: bool
    """Whether it is the half across hosts."""
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """A collective that starts and finishes at different places of the graph. It sends what a widening cast in front of it
    reads."""

    collective: Collective
    slot: int = 0
    """The landing memory that it uses, of the group's split slots."""
    zero_copy: bool = False
    """A gather returns its landing memory, until a third op releases it (windows/landing_result.py)."""
    concurrent: tuple[Node, ...] = ()
    """Of an all_to_all: matmuls and the like between its start and finish."""
    halves: tuple[Half, ...] = ()
    """Of a hierarchical collective: the two that it consists of, in order."""
    bucket: tuple[Collective, ...] = ()
    """Further collectives that are sent together with it."""

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        """None: whatever runs between start and finish hides it."""
        return ()

    @property
    def independent(self) -> tuple[Matmul, ...]:
        return ()

    @property
    def members(self) -> list[Node]:
        """The nodes that the site replaces."""
        nodes: list[Node] = []
        for c in (self.collective, *self.bucket):
            assert c.wait is not None
            nodes += [*(c.widening.nodes if c.widening else ()), c.node, c.wait]
        return nodes


@dataclass(frozen=True, slots=True)
class Fused:
    """A collective of few tokens with what follows a reduction, as one kernel."""

    collective: Collective
    inner: tuple[Node, ...] = ()
    """Views and casts between these values that only the site reads."""
    branch: Branch | None = None
    """What lies between the result and the residual; None without a residual."""
    residual: Node | None = None
    sum: Node | None = None
    """The sum of the branch and the residual: a result of the op. None where nothing but the norm reads it, in fp32."""
    norm: Norm | None = None
    """The norm of the sum, or of the result without a residual: another result."""
    round_sum: bool = True
    """Whether the norm reads the sum in the type of the collective, not in fp32."""
    cast: Float8Cast | None = None
    """The cast of the norm to float8, which is the result then."""
    why_no_cast: str = ""
    """Why a cast to float8 behind the norm is not part of the site; "" where there is none."""

    @property
    def reduced(self) -> Node:
        """The collective's result."""
        assert self.collective.wait is not None
        return self.collective.wait

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        """None: the op begins when its input is ready."""
        return ()

    @property
    def independent(self) -> tuple[Matmul, ...]:
        return ()

    @property
    def members(self) -> list[Node]:
        """The nodes that the site replaces."""
        parts = [*self.inner, *(self.branch.nodes if self.branch else ()), *([self.sum] if self.sum is not None else [])]
        parts += [*(self.norm.nodes if self.norm else ()), *(self.cast.nodes if self.cast else ())]
        return [self.collective.node, self.reduced, *parts]


Match = Gather | Reduction
"""A site whose matmuls consume or produce the data of the collective."""
Site = Match | Bulk | Split | Fused


@dataclass(slots=True)
class Candidate:
    """One collective of the graph and its possible sites."""

    collective: Collective
    match: Match | None = None
    miss: Miss | None = None
    independent_matmuls: tuple[Matmul, ...] = field(default_factory=tuple)
    """Matmuls that neither need the collective nor feed it, nearest first."""
    fused: Fused | Miss | None = None
    """The form as one kernel for few tokens, or why there is none. None where it was not looked for."""
    carrier: int | None = None
    """For a gather of row scales: the number of the candidate that gathers the rows."""
