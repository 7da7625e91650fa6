"""Matmuls of few tokens that read one matrix become one, where their weights lie next to each other in memory.

    x @ wq.t(), x @ wk.t(), x @ wv.t()    ->    slices of x @ packed_weight([wq, wk, wv]).t()

Only weights that `ub_overlap.pack` has laid out so: no weight is copied. Where all matmuls of a group have biases (Qwen 2),
these are joined in every step, by one small kernel. So a sum is rounded once, as it was. A matmul of few tokens takes 6 us on
an H200 however small its weight is, and larger ones leave memory idle at their begin and end. Packed, q, k and v of a Llama 8B
took 11 to 12 us in place of 23 to 25 at TP 2, and 7 to 8 in place of 21 to 23 at TP 8; its gate and up 31 to 34 in place of 35
to 40, and 11 to 13 in place of 17 to 19. Batches of 1, 16 and 64 tokens, 2026-11-26.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import aten, dtype_of, shape_of
from ..graph.emitter import Emitter
from ..graph.erase import erase_unread
from ..graph.graph_inputs import Neighbors
from ..graph.matmul import Matmul, Operand, as_matmul
from ..graph.operand_source import find_source
from ..graph.sizes import is_same_shape
from ..match.pack_groups import order_in_memory
from .packed_operands import PackedOperands
from .part_strides import Outputs, update_strides

MOST_ROWS = 64
"""Tokens. More were not measured."""


def pack_siblings(graph: Graph, neighbors: Neighbors, outputs: Outputs, digest: str = "") -> int:
    """Merge matmuls of few tokens, in place, and return the number of groups.

    `neighbors`: weights that lie next to each other. `outputs`: the parts of results that the graph may return.
    `digest`: of the graph's plan, for the names of the groups in warnings.
    """
    packed = PackedOperands()
    groups = _find_groups(graph, neighbors)
    for number, group in enumerate(groups):
        _merge(graph, group, packed, f"{digest}/siblings.{number}")
    if groups:
        update_strides(graph, packed.parts, outputs)
        graph.lint()
    return len(groups)


def _find_groups(graph: Graph, neighbors: Neighbors) -> list[list[Matmul]]:
    """Return groups of two or more matmuls, in the order of their weights in memory."""
    found: defaultdict[tuple[Operand, int, bool], list[Matmul]] = defaultdict(list)
    for node in graph.nodes if neighbors else ():
        matmul = as_matmul(node)
        if matmul is None or not _is_of_few_tokens(matmul):
            continue
        place = neighbors.get(find_source(matmul.rhs).node)
        if place is not None:
            found[find_source(matmul.lhs), place[0], matmul.bias is not None].append(matmul)
    return [run for matmuls in found.values() for run in _adjacent_runs(matmuls, neighbors) if len(run) > 1]


def _adjacent_runs(matmuls: Sequence[Matmul], neighbors: Neighbors) -> list[list[Matmul]]:
    """Cut matmuls of one input into runs whose weights follow each other, in the order of the weights.

    Weights of other groups may lie between, as an allocator may have put several groups next to each other.
    """
    runs: list[list[Matmul]] = []
    for matmul in sorted(matmuls, key=lambda m: neighbors[find_source(m.rhs).node]):
        if runs and order_in_memory([m.rhs for m in (*runs[-1], matmul)], 1, neighbors) is not None:
            runs[-1].append(matmul)
        else:
            runs.append([matmul])
    return runs


def _is_of_few_tokens(matmul: Matmul) -> bool:
    rows, cols = matmul.shape
    value = matmul.node.meta["val"]
    if not isinstance(rows, int) and value.dim() == 2:  # a dynamic batch decides as it was traced
        rows = compat.hint_of(value.shape[0])
    is_small = isinstance(rows, int) and rows <= MOST_ROWS and isinstance(cols, int)
    return is_small and _can_join_bias(matmul) and matmul.scales is None and dtype_of(matmul.node) == dtype_of(matmul.rhs.node)


def _can_join_bias(matmul: Matmul) -> bool:
    """Return whether the matmul has no bias, or a vector of its columns that is there before the first matmul of a group."""
    bias = matmul.bias
    if bias is None:
        return True
    is_vector = is_same_shape(shape_of(bias), (matmul.rhs.cols,))
    return bias.op == "placeholder" and is_vector and dtype_of(bias) == dtype_of(matmul.node)


def _merge(graph: Graph, group: Sequence[Matmul], packed: PackedOperands, site: str) -> None:
    first = min(group, key=lambda m: m.node)  # nodes of one graph compare by their place in it
    e = Emitter(graph, first.node, {})
    with graph.inserting_before(first.node):
        weight = packed.emit(e, [m.rhs for m in group], 1, is_copied=False, site=site)
        lhs, biases = e.operand(first.lhs), [m.bias for m in group if m.bias is not None]
        if biases:
            result = e.call(aten.addmm.default, e.call(aten.cat.default, biases), lhs, weight)
        else:
            result = e.call(aten.mm.default, lhs, weight)
        sizes = [m.rhs.cols for m in group]
        parts = packed.cut(e, result, [size for size in sizes if isinstance(size, int)], 1)
        values: list[Node] = [e.reshape(part, tuple(m.node.meta["val"].shape)) for m, part in zip(group, parts, strict=True)]
    for matmul, value in zip(group, values, strict=True):
        matmul.node.replace_all_uses_with(value)
    erase_unread(graph, [m.node for m in group])
