"""matmul(s) -> reduce_scatter or all_reduce.

    mm -> [view | permute | cast]* -> reduce_scatter_tensor -> wait                           scatter dim 0, weight gradients
    mm -> view -> split(dim d) -> getitem* -> cat(dim 0) -> reduce_scatter_tensor -> wait     scatter dim d (or slice* -> cat)
    add(view(mm), view(mm)) | addmm(mm, a, b) -> ...                                          several products, one scatter
    add(mm, residual) | addmm(bias, a, b) | mul(mm, constant) -> ...                          what commutes with a sum

The walk goes backward from the collective's input: down a spine of views to the root of a sum, then over the sum's leaves.
A leaf that is a matmul becomes a term; any other leaf becomes an addend, which every rank adds before the reduction,
exactly as the graph did.
"""

from __future__ import annotations

import math

from torch.fx import Node

from ..graph.aten import (
    Blocks,
    Effect,
    aten,
    dim_of,
    dtype_of,
    element_effect,
    match_regroup,
    node_arg,
    pieces_of,
    readers,
    shape_of,
    tensor_of,
)
from ..graph.matmul import FLOATS, Matmul, as_matmul, find_indivisible_size, is_matmul
from ..graph.sizes import Size, is_same, is_same_shape, numel, squeezed
from ..plan.reasons import Reason
from .collectives import Collective, Op
from .permutes import Permute, as_permute
from .site import Miss, Reduction

_ADDS = (aten.add.Tensor,)
_SCALES = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)
_PADS = (aten.constant_pad_nd.default, aten.pad.default)
_CUTS = (*_PADS, aten.slice_scatter.default, aten.slice_backward.default, aten.slice.Tensor)


def match_reduction(c: Collective) -> Reduction | Miss:
    """The sum of products that one reduce_scatter or all_reduce reduces, or the exact reason why there is none."""
    if c.reduce_op not in ("sum", "avg"):
        return Miss(Reason.REDUCE_OP_UNSUPPORTED, f"reduces with {c.reduce_op!r}; sum and avg are overlapped")
    if dtype_of(c.input) not in FLOATS:
        return Miss(Reason.DTYPE_UNSUPPORTED, f"reduces {dtype_of(c.input)}; float32, bfloat16 and float16 are overlapped")
    spine = _spine(c)
    return spine if isinstance(spine, Miss) else _sum(c, *spine)


def _spine(
    c: Collective,
) -> tuple[Node, Blocks, tuple[Size, ...], list[tuple[object, object]], list[Node], list[Permute]] | Miss:
    """From the collective's input down to the root of the sum: (root, blocks, matrix, scales, nodes, permutes).

    `matrix` is (rows, cols) where the root is the transposed of what the collective reads, else ().
    """
    total = numel(shape_of(c.input))
    inner = total // c.ranks if isinstance(total, int) else total / c.ranks
    blocks = Blocks(1, c.ranks, inner)
    matrix: tuple[Size, ...] = ()
    after: list[tuple[object, object]] = []
    passed: list[Node] = []
    permutes: list[Permute] = []
    node = c.input
    while True:
        step = element_effect(node)
        if step is not None and step.effect is Effect.CAST:
            if dtype_of(step.source).itemsize > dtype_of(node).itemsize:
                return Miss(
                    Reason.CAST_IN_BETWEEN, f"{node.name} narrows {dtype_of(step.source)} to {dtype_of(node)} before the sum"
                )
        elif step is not None and step.effect is Effect.SWAP:
            now = squeezed(shape_of(node))
            if matrix and not is_same_shape(now, matrix[::-1]):
                return Miss(Reason.LAYOUT, f"{node.name} permutes a reshaped transpose")
            matrix = () if matrix else now
        elif step is not None:
            if matrix and not is_same_shape(squeezed(shape_of(step.source)), matrix[::-1]):
                return Miss(Reason.LAYOUT, f"{node.name} reshapes a transposed product")
        elif node.target is aten.cat.default and c.op is Op.REDUCE_SCATTER:
            pieces = pieces_of(node)
            group = match_regroup(pieces, c.ranks)
            if group is None and any(p.target in _PADS for p in pieces):
                return Miss(Reason.UNEVEN_SHARDS, f"{node.name} pads shards to one size")
            if group is None:
                return Miss(Reason.SHARD_ORDER, f"{node.name} is no plain scatter: it permutes, repeats, drops or pads shards")
            whole, axis = group
            dim, piece = dim_of(node), shape_of(pieces[0])
            if matrix or not is_same(numel(piece[:dim]), blocks.outer) or not is_same(numel(piece[dim:]), blocks.inner):
                return Miss(Reason.LAYOUT, f"{node.name} cuts shards apart")
            blocks = Blocks(numel(piece[:axis]), c.ranks, numel(piece[axis:]))
            passed += [node, *pieces, *dict.fromkeys(node_arg(p) for p in pieces if node_arg(p) is not whole)]
            node = whole
            continue
        elif not matrix and (turn := as_permute(node, blocks, reads=False)) is not None:
            blocks = turn.blocks_before
            permutes.append(turn)
        elif node.target in _SCALES and _commutes(node):
            after.append((node.target, node.args[1]))
        else:
            return node, blocks, matrix, after[::-1], passed, permutes[::-1]
        passed.append(node)
        node = step.source if step is not None else node_arg(node)


def _sum(
    c: Collective,
    root: Node,
    blocks: Blocks,
    matrix: tuple[Size, ...],
    after: list[tuple[object, object]],
    passed: list[Node],
    permutes: list[Permute],
) -> Reduction | Miss:
    absorbed = {*passed, c.node}
    kept_nodes = tuple(n for n in (root, *passed) if any(u not in absorbed for u in readers(n)))
    terms: list[tuple[Matmul, bool]] = []
    addends: list[tuple[Node, bool]] = []
    biases: list[Node] = []
    inner: list[Node] = []
    problem: list[Miss] = []

    def leaf(node: Node, swapped: bool, alone: bool) -> None:
        """Files one summand of the root. `swapped`: its matrix is the transposed of what is reduced, so that no view may give
        it another shape; `alone`: every user of `node` is inside the sum."""
        step = element_effect(node) if alone and node is not root else None
        if step is not None and step.effect is not Effect.CAST:
            turned = step.effect is Effect.SWAP
            if turned or not swapped or is_same_shape(squeezed(shape_of(step.source)), squeezed(shape_of(node))):
                inner.append(node)
                leaf(step.source, swapped != turned, len(readers(step.source)) == 1)
                return
        p = as_matmul(node) if alone else None
        if p is not None and swapped and p.scales is not None:
            p = None  # their operands have one layout
        if p is not None and swapped and not is_same_shape(squeezed(p.shape), squeezed(shape_of(node))):
            p = None  # batches that only look like a matrix
        if p is not None:
            if p.bias is not None and not _add_bias(p, swapped):
                problem.append(Miss(Reason.BROADCAST_SUM, f"{node.name} broadcasts its bias over something else than rows"))
                addends.append((node, swapped))
                return
            terms.append((p, swapped))
        elif (
            alone and node.target in _ADDS and node.kwargs.get("alpha", 1) == 1 and all(isinstance(a, Node) for a in node.args)
        ):
            a, b = node.args
            if not swapped and (row := _row_beside(node)) is not None:
                inner.append(node)
                biases.append(row[1])
                leaf(row[0], swapped, len(readers(row[0])) == 1)
                return
            if not is_same_shape(squeezed(shape_of(a)), squeezed(shape_of(node))) or not is_same_shape(  # type: ignore[arg-type]
                squeezed(shape_of(b)),  # type: ignore[arg-type]
                squeezed(shape_of(node)),
            ):
                problem.append(Miss(Reason.BROADCAST_SUM, f"{node.name} broadcasts a term of the sum"))
                addends.append((node, swapped))
                return
            inner.append(node)
            for n in (a, b):
                leaf(n, swapped, len(readers(n)) == 1 and a is not b)  # type: ignore[union-attr,arg-type]
        else:
            addends.append((node, swapped))

    def _add_bias(p: Matmul, swapped: bool) -> bool:
        """Files an addmm's first operand: a row to broadcast, or a further summand. False where it broadcasts otherwise."""
        bias = p.bias
        assert bias is not None
        if len(shape_of(bias)) == 1 and is_same(shape_of(bias)[0], p.shape[1]) and not swapped:
            biases.append(bias)
            return True
        if is_same_shape(shape_of(bias), p.shape):
            leaf(bias, swapped, len(readers(bias)) == 1)
            return True
        return False

    leaf(root, bool(matrix), True)
    if not terms:
        return problem[0] if problem else _diagnose(root)
    products = [_swap(p) if s else p for p, s in terms]
    first = products[0]
    rows, cols = first.shape
    if not all(is_same_shape(p.shape, (rows, cols)) for p in products):
        return Miss(Reason.LAYOUT, "the products of the sum have different shapes as matrices")
    if not all(is_same(numel(shape_of(n)), cols) for n in biases):
        return Miss(Reason.BROADCAST_SUM, "a row is added to the product in another shape than the matmul's")
    if len({dtype_of(n) for n in (*(p.node for p in products), *inner)}) != 1:
        return Miss(Reason.CAST_IN_BETWEEN, "the products of the sum, or the sum, have different types")
    if c.op is Op.ALL_REDUCE or blocks.rows(rows, cols) is not None:
        shard_dim_is_last = False
    elif blocks.shard_dim_is_last(rows, cols):
        shard_dim_is_last = True
    else:
        return Miss(Reason.LAYOUT, f"a shard is no block of the rows or columns of {first.node.name}")
    if refused := _scaled_form(c, products, shard_dim_is_last, kept_nodes):
        return Miss(Reason.SCALED_FORM, refused)
    return Reduction(
        c, blocks, rows, cols, shard_dim_is_last, tuple(products), tuple(addends), tuple(biases), tuple(after),
        tuple(inner), root, bool(matrix), tuple(passed), tuple(permutes), kept_nodes,
    )  # fmt: skip


def _scaled_form(c: Collective, terms: list[Matmul], shard_dim_is_last: bool, kept_nodes: tuple[Node, ...]) -> str:
    """Why float8 products cannot be reduced by the op for them, "" where they can or where there are none."""
    scales = [p.scales for p in terms]
    if not any(scales):
        return ""
    if None in scales or len({s.fast for s in scales if s}) != 1:
        return "products of different kinds are summed: float8 and 16 bits, or with fast accumulation and without"
    for term in terms:
        if indivisible := find_indivisible_size(term):
            return f"{term.node.name}: {indivisible}"
    if len({s.rows for s in scales if s}) != 1:
        return "products with scales of rows and of tensors are summed"
    if c.op is Op.ALL_REDUCE or shard_dim_is_last:
        return "float8 products are scattered by rows only"
    return f"{kept_nodes[0].name}, before the sum over ranks, is needed as well" if kept_nodes else ""


def _commutes(scale: Node) -> bool:
    """Is it by a constant that may as well follow the reduction? (One that makes infinities or NaNs may not.)"""
    by = scale.args[1]
    divides = scale.target in (aten.div.Tensor, aten.div.Scalar)
    return isinstance(by, int | float) and math.isfinite(by) and not (divides and by == 0)


def _row_beside(add: Node) -> tuple[Node, Node] | None:
    """(matrix, row) where `add` adds one row to every row of a matrix."""
    for matrix, row in (add.args, add.args[::-1]):
        assert isinstance(matrix, Node) and isinstance(row, Node)
        wide, narrow = shape_of(add), shape_of(row)
        # The row's own last dim: a column [n, 1] over [n, n] has the same elements and is another sum.
        is_row = len(squeezed(narrow)) == 1 and is_same_shape(narrow[-1:], wide[-1:])
        if is_row and is_same_shape(shape_of(matrix), wide) and len(squeezed(wide)) > 1:
            return matrix, row
    return None


def _swap(p: Matmul) -> Matmul:
    return Matmul(p.node, p.rhs.t, p.lhs.t, p.bias)


def _diagnose(root: Node) -> Miss:
    """Why the root of a sum without products is none."""
    near = [n for n in root.all_input_nodes if _reaches_matmul(n)]
    if is_matmul(root):
        return Miss(Reason.LAYOUT, f"{root.name} is a batched product")
    if root.target in _CUTS:
        return Miss(Reason.UNEVEN_SHARDS, f"{root.name} pads or cuts the product before it is scattered")
    if (scaled := _scaled(root)) is not None:
        return Miss(Reason.SCALE_NOT_CONSTANT, f"{scaled.name} scales the product by a tensor")
    if near and root.target in (aten.permute.default, aten.transpose.int):
        return Miss(Reason.LAYOUT, f"{root.name} mixes the scattered dim with others")
    if near and tensor_of(root) is not None:
        return Miss(Reason.NON_LINEAR, f"{root.name} ({root.target}) does not commute with the reduction")
    origin = root.target if root.op == "call_function" else root.op
    if root.op == "placeholder":
        origin = "an input of the graph: a matmul of another graph may make it, before a graph break or DDPOptimizer's split"
    return Miss(Reason.NO_MATMUL, f"the reduced tensor comes from {root.name} ({origin})")


_TERMS = 64
"""Of a sum, how many are looked at for the reason why it is no site: residual streams are sums without an end."""


def _scaled(root: Node) -> Node | None:
    """What scales a product behind it, in the sum whose root is `root`."""
    todo, seen = [root], set[Node]()
    while todo and len(seen) < _TERMS:
        node = todo.pop()
        while (step := element_effect(node)) is not None:
            node = step.source
        if node in seen:
            continue
        seen.add(node)
        if node.target in _SCALES and any(_reaches_matmul(n) for n in node.all_input_nodes):
            return node
        todo += reversed(node.all_input_nodes if node.target in _ADDS else [])
    return None


def _reaches_matmul(node: Node) -> bool:
    while not is_matmul(node):
        step = element_effect(node)
        if step is None:
            return False
        node = step.source
    return True
