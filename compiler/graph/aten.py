"""The effect of one ATen node on the elements of its input.

Both walks (forward from a gather, backward from a reduction) read a graph through `element_effect`. It covers the spelling:
Inductor's decomposed ops, AOTAutograd's plain ones, and einsum's permutes of size-1 dims.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch.fx import Graph, GraphModule, Node

from ub_overlap import _torch_compat as compat

from .sizes import Size, as_sizes, divide, is_same, is_same_shape, numel, squeezed

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints,
    aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default, aten._reshape_alias.default,
}  # fmt: skip
"""Ops that keep the elements in row-major order: views, and copies of the same shape."""
_SHARES = {operator.getitem, aten._unsafe_view.default, c10d.wait_tensor.default}
"""Ops that share their input's memory although their schema does not say so."""
CUTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
PERMUTES = {aten.permute.default, aten.t.default, aten.transpose.int, aten.numpy_T.default}
DIVISIONS = {aten.div.Tensor, aten.div.Scalar}
SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, *DIVISIONS)
Scaling = tuple[object, int | float]
"""(op, constant)."""
PADS = (aten.constant_pad_nd.default, aten.pad.default)
CASTS = {aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default}
_UNTAGGED_MAPS = (aten.clone.default, aten.cat.default, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
"""Ops that map elements although torch does not tag them as pointwise."""


class Effect(Enum):
    """The kinds of effect on elements."""

    SAME = auto()
    """The same elements in the same row-major order: views and clones."""
    TRANSPOSE = auto()
    """The elements of the transposed matrix."""
    CAST = auto()
    """The elements in another type."""
    BITCAST = auto()
    """The same bytes as another one-byte type: float8 is communicated as uint8."""


@dataclass(frozen=True, slots=True)
class ElementEffect:
    """The effect of a node on the elements of its input `source`."""

    kind: Effect
    source: Node


def tensor_of(node: Node) -> torch.Tensor | None:
    """Return the fake tensor of `node`, or None for other values."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def shape_of(node: Node) -> tuple[Size, ...]:
    """Return the shape of the tensor of `node`."""
    val = tensor_of(node)
    assert val is not None, f"{node} has no tensor value"
    return as_sizes(val.shape)


def dtype_of(node: Node) -> torch.dtype:
    """Return the type of the tensor of `node`."""
    val = tensor_of(node)
    assert val is not None, f"{node} has no tensor value"
    return val.dtype


def node_arg(node: Node, index: int = 0) -> Node:
    """Return argument `index` of `node`, which must be a node."""
    arg = node.args[index]
    assert isinstance(arg, Node), f"{node}: argument {index} is {arg!r}, expected a node"
    return arg


def alias_base(node: Node) -> Node | None:
    """Return the node whose memory `node` is a view of, or None."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    if node.target in _SHARES:
        return node.all_input_nodes[0]
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return node.all_input_nodes[0] if returns and returns[0].alias_info is not None else None


def is_mutable(node: Node) -> bool:
    """Return whether `node` writes to a tensor. Functional collectives and their waits only look impure."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    if not isinstance(node.target, compat.HigherOrderOperator):
        return False
    if node.target.name() == "triton_kernel_wrapper_mutation":
        return True
    written = (t for graph in subgraphs_of(node) for n in graph.nodes if is_mutable(n) for t in written_by(n))
    return any(storage_node(t).op in ("placeholder", "get_attr") for t in written)


def written_by(node: Node) -> list[Node]:
    """Return the tensors that a mutable node writes to: all inputs of a higher-order op."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.all_input_nodes
    given = {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in compat.tree_leaves(written) if isinstance(value, Node)]


def written_memory(graph: Graph) -> set[Node]:
    """Return the nodes that allocated memory to which the graph writes: what it holds depends on the place where it is read."""
    return {storage_node(i) for n in graph.nodes if is_mutable(n) for i in n.all_input_nodes}


def is_elementwise(node: Node) -> bool:
    """Return whether each element of `node` is computed from single elements of its inputs, or is one of them."""
    if alias_base(node) is not None or node.target in CASTS or node.target in _UNTAGGED_MAPS:
        return True
    return isinstance(node.target, compat.OpOverload) and torch.Tag.pointwise in node.target.tags


def is_random(node: Node) -> bool:
    """Return whether `node` draws random numbers, so that it keeps its place among others that do."""
    return isinstance(node.target, compat.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def storage_node(node: Node) -> Node:
    """Return the node that allocated the memory of `node`."""
    while (base := alias_base(node)) is not None:
        node = base
    return node


def pieces_of(cat: Node) -> list[Node]:
    """Return the tensors that a cat joins."""
    return [n for n in cat.args[0] if isinstance(n, Node)]  # type: ignore[union-attr]


def dim_of(node: Node, index: int = 1) -> int:
    """Return the `dim` argument of a cat, split or slice, at position `index` or by name, counted from the front."""
    dim = node.args[index] if len(node.args) > index else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    first = pieces_of(node)[0] if node.target is aten.cat.default else node_arg(node)
    return dim % len(shape_of(first))


def subgraphs_of(node: Node) -> list[Graph]:
    """Return the graphs that a higher-order op calls, e.g. of invoke_subgraph or cond."""
    owner = node.graph.owning_module
    if node.op != "call_function" or owner is None:
        return []
    targets = [str(i.target) for i in node.all_input_nodes if i.op == "get_attr"]
    modules = [functools.reduce(getattr, target.split("."), owner) for target in targets]
    return [module.graph for module in modules if isinstance(module, GraphModule)]


def readers(node: Node) -> list[Node]:
    """Return the users that read elements of `node`: all except those that only read a size."""
    return [u for u in node.users if u.target is not aten.sym_size.int]


def permutation(node: Node) -> list[int]:
    """Return the order of dims of the result of a permute, transpose or t."""
    rank = len(shape_of(node_arg(node)))
    if node.target is aten.permute.default:
        return [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr,arg-type]
    dims = list(range(rank))
    if node.target is not aten.transpose.int:
        return dims[::-1]
    a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def constant_scaling(node: Node) -> Scaling | None:
    """Return the scaling by a constant that `node` is: what commutes with gathers and sums, but rounds. None for other nodes.

    None of these constants gives infinities or NaNs, which would change a sum that follows it. A tensor, of any size, may
    differ between ranks. Division that rounds to integers is another op.
    """
    if node.target is aten.neg.default:
        return aten.mul.Tensor, -1
    if node.target not in SCALINGS or len(node.args) != 2 or node.kwargs:
        return None
    constant = node.args[1]
    if not isinstance(constant, int | float) or not math.isfinite(constant):
        return None
    return None if node.target in DIVISIONS and constant == 0 else (node.target, constant)


def is_getitem(node: Node) -> bool:
    """Return whether `node` is one of the parts that a split or chunk returns."""
    return node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].target in CUTS


def element_effect(node: Node) -> ElementEffect | None:
    """Return the effect of `node` on the elements of its tensor input, or None if it does more than pass them on."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    src = node.args[0]
    if node.target is aten.copy.default and isinstance(node.args[1], Node):  # an in-place collective, functionalized
        full = is_same_shape(shape_of(node.args[1]), shape_of(node)) and dtype_of(node.args[1]) == dtype_of(node)
        return ElementEffect(Effect.SAME, node.args[1]) if full else None
    before, after = tensor_of(src), tensor_of(node)
    if before is None or after is None:
        return None
    if node.target in VIEWS:
        return ElementEffect(Effect.SAME, src) if before.dtype == after.dtype else None
    if node.target is aten.view.dtype:
        if before.dtype == after.dtype:
            return ElementEffect(Effect.SAME, src)
        return ElementEffect(Effect.BITCAST, src) if before.dtype.itemsize == after.dtype.itemsize == 1 else None
    if node.target in CASTS:
        if before.device != after.device:
            return None
        return ElementEffect(Effect.SAME if before.dtype == after.dtype else Effect.CAST, src)
    if node.target in PERMUTES:
        dims, shape = permutation(node), shape_of(src)
        moved = [d for d in dims if not (isinstance(shape[d], int) and shape[d] == 1)]
        if moved == sorted(moved):
            return ElementEffect(Effect.SAME, src)
        return ElementEffect(Effect.TRANSPOSE, src) if len(moved) == 2 else None
    if node.target is aten.expand.default and is_same_shape(squeezed(shape_of(src)), squeezed(shape_of(node))):
        return ElementEffect(Effect.SAME, src)
    if node.target is aten.as_strided.default:
        contiguous = before.is_contiguous() and after.is_contiguous() and not any(node.args[3:]) and not node.kwargs
        return ElementEffect(Effect.SAME, src) if contiguous and is_same(numel(shape_of(src)), numel(shape_of(node))) else None
    if node.target is aten.slice.Tensor and is_same_shape(shape_of(src), shape_of(node)):
        return ElementEffect(Effect.SAME, src) if len(node.args) < 5 or node.args[4] == 1 else None
    return None


@dataclass(frozen=True, slots=True)
class ShardBlocks:
    """The place of rank r's elements in a value, in row-major order: element (o, r, i) of [outer, ranks, inner]."""

    outer: Size
    ranks: int
    inner: Size

    def rows(self, rows: Size, cols: Size) -> Size | None:
        """Return the rows of one (outer, rank) block of the value as [rows, cols]. None unless a block is whole rows."""
        return divide(self.inner, cols)

    def shard_dim_is_last(self, rows: Size, cols: Size) -> bool:
        """Return whether the columns of the value as [rows, cols] are sharded."""
        return is_same(self.outer, rows) and is_same(self.inner * self.ranks, cols)


def match_regroup(pieces: list[Node], ranks: int) -> tuple[Node, int] | None:
    """Return (tensor, dim) if `pieces` are the `ranks` equal parts of one dim of one tensor, complete and in order.

    The source, the index or bounds and the order of every piece are checked: a permuted or trimmed cat gives None.
    """
    cuts = [c for p in pieces if (c := read_cut(p)) is not None]
    if len(pieces) != ranks or len(cuts) != ranks:
        return None
    source, axis = cuts[0][:2]
    part = divide(shape_of(source)[axis], ranks)
    if part is None:
        return None
    for i, (tensor, dim, start, end) in enumerate(cuts):
        if tensor is not source or dim != axis or not is_same(start, part * i) or not is_same(end, part * (i + 1)):
            return None
    return source, axis


def read_cut(piece: Node) -> tuple[Node, int, Size, Size] | None:
    """Return (source, dim, start, end) of a slice, or of a getitem of a split or chunk. Pieces of float8 may be bytes."""
    step = element_effect(piece) if piece.target is aten.view.dtype else None
    if step is not None:
        piece = step.source
    if piece.target is aten.slice.Tensor and not piece.kwargs:
        dim = dim_of(piece)
        start = _scalar(piece.args[2]) if len(piece.args) > 2 and piece.args[2] is not None else 0
        if start is None or (len(piece.args) > 4 and piece.args[4] != 1):
            return None
        if isinstance(start, int) and start < 0:
            size = shape_of(node_arg(piece))[dim]
            start = max(size + start, 0) if isinstance(size, int) else size + start
        return node_arg(piece), dim, start, start + shape_of(piece)[dim]
    split = piece.args[0] if piece.args else None
    if (
        piece.target is not operator.getitem
        or not isinstance(split, Node)
        or split.target not in CUTS
        or "val" not in split.meta
    ):
        return None
    dim = dim_of(split, 2)
    lengths = [as_sizes(v.shape)[dim] for v in split.meta["val"]]
    index = piece.args[1]
    assert isinstance(index, int)
    index %= len(lengths)
    begin: Size = sum(lengths[:index])
    return node_arg(split), dim, begin, begin + lengths[index]


def _scalar(x: object) -> Size | None:
    if isinstance(x, int):
        return x
    if isinstance(x, Node) and isinstance(x.meta.get("val"), int | torch.SymInt):
        return as_sizes([x.meta["val"]])[0]
    return None
