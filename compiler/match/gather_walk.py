"""The forward walk from an all_gather over the nodes that hold gathered elements, and over their readers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch.fx import Node

from ub_overlap.runtime.fp8.numerics import FLOAT8

from ..graph.aten import (
    CUTS,
    Effect,
    ElementEffect,
    ShardBlocks,
    aten,
    constant_scaling,
    dim_of,
    dtype_of,
    element_effect,
    match_regroup,
    pieces_of,
    read_cut,
    readers,
    shape_of,
    tensor_of,
)
from ..graph.matmul import Matmul, as_matmul, is_matmul
from ..graph.sizes import Size, divide, is_same, is_same_shape, numel, squeezed
from ..plan.reasons import Reason
from .collectives import Collective
from .permutes import permute_of_input
from .site import Consumer, GatheredAlias, Miss

_SEARCH_LIMIT = 8
"""Nodes examined for a matmul after a reader that ends the walk."""


class MatmulUse(NamedTuple):
    """A matmul that reads the alias `node`, whose layout is `alias`."""

    node: Node
    consumer: Consumer
    alias: GatheredAlias


class GatherWalk:
    """The readers of one all_gather.

    `aliases`: nodes that hold gathered elements. `uses`: matmuls that read them. `kept`: aliases that other nodes read.
    `blocked`: why readers are no consumers. `cuts`: splits, getitems and slices between two aliases.
    """

    def __init__(self, c: Collective) -> None:
        self.collective = c
        self.aliases: dict[Node, GatheredAlias] = {}
        self.uses: list[MatmulUse] = []
        self.kept: list[Node] = []
        self.blocked: list[Miss] = []
        self.cuts: dict[Node, None] = {}
        self._gathered_dtype = dtype_of(c.node)
        assert c.wait is not None
        inner = divide(numel(shape_of(c.wait)), c.ranks)
        assert inner is not None, "an all_gather's output is a multiple of its ranks"
        self.aliases[c.wait] = GatheredAlias(ShardBlocks(1, c.ranks, inner), dtype_of(c.wait))
        if any(u is not c.wait for u in readers(c.node)):  # saved for backward, which has its own wait
            self.aliases[c.node] = self.aliases[c.wait]
            self.kept.append(c.node)
        self._walk(c.wait)

    def _walk(self, wait: Node) -> None:
        todo = [wait]
        while todo:
            node = todo.pop()
            for reader in node.users:
                todo += self._add_reader(node, self.aliases[node], reader)

    def _keep(self, node: Node, miss: Miss | None = None) -> None:
        """Record that a node outside of the site reads the alias `node`, and why it is no consumer."""
        self.kept.append(node)
        if miss is not None:
            self.blocked.append(miss)

    def _add_reader(self, node: Node, alias: GatheredAlias, reader: Node) -> list[Node]:
        """Record a reader of the alias `node`. Return the aliases that it adds."""
        if reader in self.aliases or reader.target is aten.sym_size.int:
            return []
        matmul = as_matmul(reader)
        if matmul is not None and matmul.bias is not node:
            self._add_matmul(node, alias, matmul)
            return []
        effect = element_effect(reader)
        if effect is not None and effect.source is not node:
            effect = None  # `reader` overwrites the alias
        if effect is None and (reader.target in CUTS or reader.target is aten.slice.Tensor):
            return self._add_cut(node, alias, reader)
        if effect is not None and effect.kind is Effect.CAST:
            if alias.dtype.itemsize == 1 and self._gathered_dtype.itemsize == 1:
                self._keep(node)  # gathered float8 is scaled in the type of this cast
                return []
            if not _is_exact_cast(self._gathered_dtype, alias.dtype):
                detail = f"{reader.name} is a second cast, of values that the first cast rounded"
                self._keep(node, Miss(Reason.CAST_IN_BETWEEN, detail))
                return []
        moved = _pass_reader(alias, reader, effect)
        if moved is None:
            self._keep(node, _explain_reader(reader, effect, alias.dtype != self._gathered_dtype))
            return []
        self.aliases[reader] = moved
        return [reader]

    def _add_cut(self, node: Node, alias: GatheredAlias, cut: Node) -> list[Node]:
        """Record a split, chunk or slice. The walk continues only through a cat that joins its pieces."""
        pieces = [cut] if cut.target is aten.slice.Tensor else list(cut.users)
        as_bytes = [u for p in pieces for u in p.users if u.target is aten.view.dtype and alias.dtype.itemsize == 1]
        cats = dict.fromkeys(u for p in (*pieces, *as_bytes) for u in p.users if u.target is aten.cat.default)
        only_cats = all(u in cats or u in as_bytes for p in (*pieces, *as_bytes) for u in p.users)
        added: list[Node] = []
        for cat in cats:
            moved = self._regroup(node, alias, cat)
            if moved is None:
                only_cats = False
                detail = f"{cat.name} is not a plain gather: it permutes, repeats or drops shards"
                self.blocked.append(Miss(Reason.SHARD_ORDER, detail))
            elif cat not in self.aliases:
                self.aliases[cat] = moved
                added.append(cat)
        if cats and only_cats:
            self.cuts.update(dict.fromkeys((cut, *pieces, *as_bytes)))
        else:
            self._keep(node, None if cats else _explain_cut(node, cut, pieces))
        return added

    def _regroup(self, node: Node, alias: GatheredAlias, cat: Node) -> GatheredAlias | None:
        """The layout of a cat that joins the shards of the alias `node` along another dim; None for other cats."""
        pieces = pieces_of(cat)
        group = match_regroup(pieces, self.collective.ranks)
        if group is None or group[0] is not node or alias.is_transposed:
            return None
        axis, dim, piece = group[1], dim_of(cat), shape_of(pieces[0])
        if not is_same(numel(piece[:axis]), alias.blocks.outer) or not is_same(numel(piece[axis:]), alias.blocks.inner):
            return None
        dtype = dtype_of(cat) if alias.dtype.itemsize == 1 else alias.dtype
        return GatheredAlias(
            ShardBlocks(numel(piece[:dim]), self.collective.ranks, numel(piece[dim:])), dtype, permutes=alias.permutes
        )

    def _add_matmul(self, node: Node, alias: GatheredAlias, matmul: Matmul) -> None:
        """Record a matmul that reads the alias `node`: as a use if the alias is its left or right operand."""
        lhs, rhs = matmul.lhs, matmul.rhs
        if matmul.scales is not None and (lhs.node is not node or alias.is_transposed or alias.dtype not in FLOAT8):
            miss = Miss(Reason.SCALED_FORM, f"{matmul.node.name}: float8 rows are gathered as the left operand only")
            self._keep(node, miss if node in (lhs.node, rhs.node) else None)
            return
        if node not in (lhs.node, rhs.node):
            self._keep(node)
            return
        is_lhs = lhs.node is node
        gathered, operand = (lhs, rhs) if is_lhs else (rhs, lhs.t)
        if alias.is_transposed and not is_same_shape(squeezed((gathered.cols, gathered.rows)), squeezed(alias.matrix)):
            detail = f"{matmul.node.name} reads a different matrix than the permute before it produces"
            self._keep(node, Miss(Reason.LAYOUT, detail))
            return
        # A left operand is G, or G^T after a permute. For a right operand: A @ G = (G^T @ A^T)^T.
        consumer = Consumer(matmul, alias.is_transposed == is_lhs, not is_lhs, operand)
        self.uses.append(MatmulUse(node, consumer, alias))


def _is_exact_cast(source: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a cast from `source`, one of FLOATS, to `dtype` keeps every value."""
    return dtype in (source, torch.float32, torch.float64)


def _pass_reader(alias: GatheredAlias, reader: Node, effect: ElementEffect | None) -> GatheredAlias | None:
    """The layout of `reader`, which reads `alias`; None if it does not keep the elements and their order."""
    moved = _pass_effect(alias, reader, effect.kind) if effect else None
    if moved is None and not alias.is_transposed and (permute := permute_of_input(reader, alias.blocks)) is not None:
        return GatheredAlias(permute.blocks_after, alias.dtype, permutes=(*alias.permutes, permute))
    return moved


def _pass_effect(alias: GatheredAlias, reader: Node, effect: Effect) -> GatheredAlias | None:
    """The layout after a view, a transpose or a cast; None where the order of elements is lost."""
    shape = squeezed(shape_of(reader))
    if effect is Effect.CAST:
        dtype = tensor_of(reader).dtype  # type: ignore[union-attr]
        return replace(alias, dtype=dtype) if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None
    if effect is Effect.BITCAST:
        return replace(alias, dtype=dtype_of(reader))
    if effect is Effect.SAME:
        if alias.is_transposed and not is_same_shape(shape, squeezed(alias.matrix)[::-1]):
            return None
        return alias
    if alias.is_transposed:
        return replace(alias, matrix=()) if is_same_shape(shape, squeezed(alias.matrix)) else None
    return replace(alias, matrix=shape[::-1])


def _explain_reader(reader: Node, effect: ElementEffect | None, is_cast: bool) -> Miss | None:
    """Why a reader that ends the walk is no consumer; None if no matmul follows it. `is_cast`: it reads a cast."""
    if is_matmul(reader) and as_matmul(reader) is None:
        return Miss(Reason.LAYOUT, f"{reader.name} ({reader.target}) is not a single matmul: batched or scaled")
    if effect is not None or reader.target in (aten.permute.default, aten.expand.default):
        return Miss(Reason.LAYOUT, f"{reader.name} mixes the gathered dim with others")
    matmul = _find_matmul_after(reader)
    if matmul is None:
        return None
    if reader.target is aten.constant_pad_nd.default:
        return Miss(Reason.UNEVEN_SHARDS, f"{reader.name} pads or trims the gathered tensor")
    if constant_scaling(reader) is not None:  # joint/scale_shards.py has left it here
        if is_cast:
            return Miss(Reason.CAST_IN_BETWEEN, f"{reader.name} scales after a cast, in whose type the shard would be sent")
        return Miss(Reason.NON_LINEAR, f"{reader.name} scales for {matmul.name} what others read as it is gathered")
    return Miss(Reason.NON_LINEAR, f"{reader.name} stands between the gather and {matmul.name}")


def _explain_cut(node: Node, cut: Node, pieces: list[Node]) -> Miss | None:
    """Why matmuls that read pieces of the gathered `node` are no consumers; None if there are none."""
    trims = (*CUTS, aten.slice.Tensor, aten.cat.default)
    if not _cuts_all(node, cut) or any(u.target in trims for p in pieces for u in p.users):
        return Miss(Reason.UNEVEN_SHARDS, f"{cut.name} trims or cuts the gathered tensor")
    matmul = next(filter(None, map(_find_matmul_after, pieces)), None)
    return Miss(Reason.LAYOUT, f"{cut.name} cuts the gathered tensor, and {matmul.name} reads a piece") if matmul else None


def _cuts_all(node: Node, cut: Node) -> bool:
    """Return whether the pieces of `cut`, or all slices of its dim, have all elements of `node` in a row."""
    pieces = list(cut.users) if cut.target in CUTS else [u for u in node.users if u.target is aten.slice.Tensor]
    dim = dim_of(cut, 2 if cut.target in CUTS else 1)
    bounds = [(start, end) for _, at, start, end in filter(None, map(read_cut, pieces)) if at == dim]
    todo: list[Size] = [0]
    while todo:
        reached = todo.pop()
        if is_same(reached, shape_of(node)[dim]):
            return True
        todo += [end for start, end in bounds if is_same(start, reached) and not is_same(end, reached)]
    return False


def _find_matmul_after(node: Node) -> Node | None:
    """The matmul that reads `node`, directly or through views."""
    todo, seen = [node], 0
    while todo and seen < _SEARCH_LIMIT:
        for user in todo.pop().users:
            seen += 1
            if is_matmul(user):
                return user
            if element_effect(user) is not None:
                todo.append(user)
    return None
