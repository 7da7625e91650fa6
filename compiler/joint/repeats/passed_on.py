"""Ops that pass repeats on from their inputs to their results: views, permutes, cuts, cats, sums, casts and collectives.

With T as "one element for all r of a Repeat", or as "the sum over r", T(op(x)) = op'(T(x)), where op' is the same op on fewer
elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch.fx import Node

from ...graph.aten import (
    CASTS,
    PERMUTES,
    VIEWS,
    aten,
    c10d,
    dim_of,
    dtype_of,
    is_getitem,
    permutation,
    pieces_of,
    read_cut,
    shape_of,
    tensor_of,
)
from ...graph.emitter import Emitter
from .repeat import Repeat

EXCHANGES = (
    c10d.all_gather_into_tensor.default,
    c10d.all_to_all_single.default,
    c10d.reduce_scatter_tensor.default,
)
"""Collectives that move rows of dim 0. What they add up, they add up element by element."""
ADDABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types in which gradients are added up."""
_ROUNDINGS = {*((t, t) for t in ADDABLE), (torch.float32, torch.bfloat16), (torch.float32, torch.float16)}
"""Casts (from, to) that sums may move in front of: a sum of the first type, rounded once, in place of one of rounded terms."""
_COPIES = (aten.clone.default, aten.contiguous.default)


def is_static(node: Node) -> bool:
    """Return whether `node` is a tensor of known sizes above 0."""
    return tensor_of(node) is not None and all(isinstance(size, int) and size > 0 for size in shape_of(node))


def needed(node: Node, repeat: Repeat) -> dict[Node, Repeat] | None:
    """Return the repeats that the inputs of `node` have if its result has `repeat`. None if `node` passes no repeats on."""
    inputs = _inputs(node)
    if not inputs or not is_static(node) or not all(map(is_static, inputs)):
        return None
    if node.target in VIEWS:
        before = repeat.viewed(shape_of(node), shape_of(inputs[0]))
        return None if before is None or dtype_of(node) != dtype_of(inputs[0]) else {inputs[0]: before}
    if node.target in PERMUTES:
        before = Repeat(permutation(node)[repeat.dim], repeat.count, repeat.inner)
        return {inputs[0]: before}
    if not all(len(shape_of(i)) == len(shape_of(node)) and repeat.fits(shape_of(i)) for i in inputs):
        return None
    return dict.fromkeys(inputs, repeat) if _keeps_together(node, inputs, repeat) else None


def carried(node: Node, repeats: Mapping[Node, Repeat]) -> Repeat | None:
    """Return the repeat of the result of `node` if its inputs have `repeats`, None if it has none."""
    first = next((i for i in _inputs(node) if i in repeats), None)
    if first is None or not is_static(node):
        return None
    before: Repeat = repeats[first]
    after: Repeat | None = before
    if node.target in VIEWS:
        after = before.viewed(shape_of(first), shape_of(node))
    elif node.target in PERMUTES:
        after = before.permuted(permutation(node))
    if after is None or after.dim >= len(shape_of(node)) or not after.fits(shape_of(node)):
        return None
    wanted = needed(node, after)
    return after if wanted is not None and all(repeats.get(i) == r for i, r in wanted.items()) else None


def passes_sums(node: Node, inputs: Iterable[Node]) -> bool:
    """Return whether a sum over repeats of `node` may be made of those of its inputs.

    In front of a wider type, or of one with fewer numbers, a sum would round or overflow where the traced one does not.
    """
    before = [dtype_of(i) for i in inputs]
    if node.target in CASTS:
        return (before[0], dtype_of(node)) in _ROUNDINGS
    return all(dtype in ADDABLE for dtype in before)


def emit_smaller(
    e: Emitter, node: Node, repeat: Repeat, smaller: Mapping[Node, Node], splits: MutableMapping[Node, Node]
) -> Node:
    """Emit T(`node`) of T of its inputs, `smaller`. `splits`: those of T of their inputs, by the split."""
    inputs = [smaller[i] for i in _inputs(node)]
    first = inputs[0]
    if node.target in VIEWS:
        shaped = e.reshape(first, tuple(repeat.shape_without(shape_of(node))))
        return e.contiguous(shaped) if node.target in _COPIES else shaped
    if node.target in PERMUTES:
        return e.call(aten.permute.default, first, permutation(node))
    if is_getitem(node):
        split, index = node.args
        assert isinstance(split, Node) and isinstance(index, int)
        if split not in splits:
            splits[split] = _split(e, split, first, repeat)
        return e.item(splits[split], index)
    if node.target is aten.slice.Tensor:
        _, dim, start, end = _read_cut(node)
        return e.call(aten.slice.Tensor, first, dim, repeat.scaled(dim, start), repeat.scaled(dim, end))
    if node.target is aten.cat.default:
        return e.call(aten.cat.default, [smaller[i] for i in pieces_of(node)], dim_of(node))
    if node.target is aten.slice_scatter.default:
        dim, start, end = _place(node)
        places = repeat.scaled(dim, start), repeat.scaled(dim, end)
        return e.call(aten.slice_scatter.default, *(smaller[i] for i in node.args[:2]), dim, *places)  # type: ignore[index]
    if node.target is c10d.all_to_all_single.default:
        rows = [[repeat.scaled(0, n) for n in _splits(node, side)] for side in (1, 2)]
        return e.call(node.target, e.contiguous(first), *rows, *node.args[3:], **node.kwargs)
    if node.target in EXCHANGES:
        return e.call(node.target, e.contiguous(first), *node.args[1:], **node.kwargs)
    args = [smaller[a] if isinstance(a, Node) else a for a in node.args]
    return e.call(node.target, *args, **node.kwargs)  # a cast, an add, a wait


def _split(e: Emitter, split: Node, smaller: Node, repeat: Repeat) -> Node:
    """Emit a split, or a chunk, of T of its input. It stays one: a ring is recognized by the parts that it reads."""
    dim, parts = dim_of(split, 2), split.args[1]
    if split.target is aten.split.Tensor:
        parts = repeat.scaled(dim, parts)  # type: ignore[arg-type]
    elif split.target is aten.split_with_sizes.default:
        parts = [repeat.scaled(dim, rows) for rows in parts]  # type: ignore[union-attr,arg-type]
    return e.call(split.target, smaller, parts, dim)


def _inputs(node: Node) -> list[Node]:
    """Return the tensors that `node` reads, each once, if it is of a kind that passes repeats on."""
    if node.op != "call_function":
        return []
    if is_getitem(node) or node.target is aten.slice.Tensor:
        cut = read_cut(node)
        return [] if cut is None else [cut[0]]
    if node.target in EXCHANGES and node.kwargs:
        return []
    one_tensor = node.target in VIEWS or node.target in PERMUTES or node.target in CASTS or node.target in EXCHANGES
    if one_tensor or node.target in (aten.cat.default, aten.add.Tensor, aten.slice_scatter.default, c10d.wait_tensor.default):
        return list(dict.fromkeys(i for i in node.all_input_nodes if tensor_of(i) is not None))
    return []


def _keeps_together(node: Node, inputs: list[Node], repeat: Repeat) -> bool:
    """Return whether `node` keeps all r of each element together. `inputs` have its number of dims, and hold whole repeats."""
    if is_getitem(node) or node.target is aten.slice.Tensor:
        _, dim, *bounds = _read_cut(node)
        if is_getitem(node):  # all parts of a split have whole repeats, as its sizes are divided
            bounds += [part.shape[dim] for part in node.args[0].meta["val"]]  # type: ignore[union-attr]
        return all(map(_is_int, bounds)) and repeat.cuts(dim, *bounds)
    if node.target is aten.add.Tensor:
        return len(node.args) == 2 and all(isinstance(a, Node) and shape_of(a) == shape_of(node) for a in node.args)
    if node.target is aten.slice_scatter.default:
        place = _place(node)
        return len(node.args) < 6 and not node.kwargs and all(map(_is_int, place)) and repeat.cuts(place[0], *place[1:])
    if node.target in CASTS:
        return bool(node.meta["val"].device == inputs[0].meta["val"].device)
    if node.target is c10d.all_to_all_single.default:
        splits = [*_splits(node, 1), *_splits(node, 2)]
        return all(map(_is_int, splits)) and repeat.cuts(0, *splits)
    if node.target is c10d.reduce_scatter_tensor.default:
        return node.args[1] in ("sum", "avg")
    if node.target is c10d.wait_tensor.default:
        return needed(inputs[0], repeat) is not None  # else T would read what is still in flight
    return True  # a cat, a gather: of inputs that hold whole repeats


def _is_int(value: object) -> bool:
    return isinstance(value, int)


def _splits(node: Node, side: int) -> list[Any]:
    return list(node.args[side])  # type: ignore[arg-type]


def _read_cut(node: Node) -> tuple[Node, int, Any, Any]:
    cut = read_cut(node)
    assert cut is not None
    return cut


def _place(node: Node) -> tuple[Any, Any, Any]:
    """Return (dim, start, end) of a slice_scatter, counted from the front."""
    _, _, dim, start, end = (*node.args, *(0, None, None)[len(node.args) - 2 :])[:5]
    if not isinstance(dim, int) or not all(n is None or isinstance(n, int) for n in (start, end)):
        return dim, start, end
    dim %= len(shape_of(node))
    return dim, *slice(start, end).indices(shape_of(node)[dim])[:2]
