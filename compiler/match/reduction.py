"""The sum of matmuls in front of a reduction, as reduce_scatter and all_reduce share it.

    add(view(mm), view(mm)) | addmm(mm, a, b) -> ...              several matmuls, one reduction
    add(mm, residual) | sub(mm, 0.5) | addmm(bias, a, b)          addends
    mul(mm, constant)                                             operations that commute with a sum

The walk goes backward from the collective's input: over a chain of views to the root of a sum, then over the summands.
A summand that is a matmul becomes a term. Any other becomes an addend, which the rank adds before the reduction, exactly
as the graph did. Ranks may have different addends: a bias is often added on one rank only.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ..graph.aten import dtype_of, readers
from ..graph.matmul import FLOATS, Matmul, find_indivisible_size
from ..graph.sizes import Size, is_same_shape
from ..plan.reasons import Reason
from .collectives import Collective
from .explain_reduction import explain_no_term
from .site import Miss, Reduction, scale_of
from .sum_terms import SumTerms
from .view_chain import ViewChain, follow_view_chain


@dataclass(frozen=True, slots=True)
class ReducedSum:
    """The sum [rows, cols] that one collective reduces."""

    collective: Collective
    chain: ViewChain
    summands: SumTerms
    terms: tuple[Matmul, ...]
    kept_nodes: tuple[Node, ...]
    """The root and nodes of the chain with readers outside of the site."""

    @property
    def rows(self) -> Size:
        """The rows of the sum."""
        return self.terms[0].shape[0]

    @property
    def cols(self) -> Size:
        """The columns of the sum."""
        return self.terms[0].shape[1]

    def site(self, shard_dim_is_last: bool) -> Reduction:
        """Return the site of the collective and its sum."""
        return Reduction(
            collective=self.collective,
            blocks=self.chain.blocks,
            rows=self.rows,
            cols=self.cols,
            shard_dim_is_last=shard_dim_is_last,
            terms=self.terms,
            addends=tuple(self.summands.addends),
            # Without effect they must leave no trace: the type of the op's output depends on them, and ranks may differ.
            scalings=tuple(self.chain.scalings[::-1]) if scale_of(self.chain.scalings) != 1 else (),
            inner=tuple(self.summands.inner),
            root=self.chain.root,
            root_is_transposed=bool(self.chain.matrix),
            view_chain=tuple(self.chain.nodes),
            permutes=tuple(self.chain.permutes[::-1]),
            kept_nodes=self.kept_nodes,
        )


def find_reduced_sum(c: Collective, can_regroup: bool) -> ReducedSum | Miss:
    """Return the sum of matmuls that `c` reduces, or the reason why there is none.

    `can_regroup`: the collective scatters, so a cat may reorder its shards.
    """
    if c.reduce_op not in ("sum", "avg"):
        return Miss(Reason.REDUCE_OP_UNSUPPORTED, f"reduces with {c.reduce_op!r}; sum and avg are overlapped")
    if dtype_of(c.input) not in FLOATS:
        return Miss(Reason.DTYPE_UNSUPPORTED, f"reduces {dtype_of(c.input)}; float32, bfloat16 and float16 are overlapped")
    chain = follow_view_chain(c, can_regroup)
    if isinstance(chain, Miss):
        return chain
    summands = SumTerms(chain.root, bool(chain.matrix))
    if not summands.terms:
        return summands.blocked[0] if summands.blocked else explain_no_term(chain.root)
    absorbed = {*chain.nodes, c.node}
    kept = tuple(n for n in (chain.root, *chain.nodes) if any(u not in absorbed for u in readers(n)))
    reduced = ReducedSum(c, chain, summands, tuple(summands.matmuls), kept)
    return _check_shapes(reduced) or reduced


def _check_shapes(reduced: ReducedSum) -> Miss | None:
    """Return the reason if the summands are no matrices of one shape and type."""
    terms, summands = reduced.terms, reduced.summands
    if not all(is_same_shape(p.shape, (reduced.rows, reduced.cols)) for p in terms):
        return Miss(Reason.LAYOUT, "the matmuls of the sum have different shapes as matrices")
    if len({dtype_of(n) for n in (*(p.node for p in terms), *summands.inner)}) != 1:
        return Miss(Reason.CAST_IN_BETWEEN, "the matmuls of the sum, or the sum, have different types")
    return None


def check_scales(reduced: ReducedSum) -> Miss | None:
    """Return the reason if float8 terms do not have scales of one kind."""
    scales = [p.scales for p in reduced.terms]
    if None in scales or len({s.fast for s in scales if s}) != 1:
        detail = "matmuls of different kinds are summed: float8 and 16 bits, or with fast accumulation and without"
        return Miss(Reason.SCALED_FORM, detail)
    for term in reduced.terms:
        if indivisible := find_indivisible_size(term):
            return Miss(Reason.SCALED_FORM, f"{term.node.name}: {indivisible}")
    if len({s.rows for s in scales if s}) != 1:
        return Miss(Reason.SCALED_FORM, "matmuls with scales of rows and of tensors are summed")
    return None


def has_scales(reduced: ReducedSum) -> bool:
    """Return whether a term has float8 operands."""
    return any(p.scales for p in reduced.terms)
