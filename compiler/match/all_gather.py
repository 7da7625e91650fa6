"""all_gather -> matmuls.

    all_gather_into_tensor -> wait -> [view | permute | cast]* -> mm / addmm / bmm            gather dim 0, weights, gradients
    ... wait -> split -> getitem* -> cat(dim d) -> ...                                        gather dim d, forward
    ... wait -> slice* -> cat(dim d) -> ...                                                   gather dim d, backward
    ... wait -> view [1, S, K] -> view [S, K] -> ...                                          gather dim 1 of a batch of 1

The walk follows the gathered elements forward. Every matmul that meets them on either side, in either orientation, is
a consumer; everything else that reads them is another user, for whom the op keeps the gathered tensor.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch
from torch.fx import Node

from ub_overlap.runtime.fp8.numerics import FLOAT8

from ..graph.aten import (
    CUTS,
    Blocks,
    Effect,
    aten,
    dim_of,
    dtype_of,
    element_effect,
    match_regroup,
    pieces_of,
    readers,
    shape_of,
    tensor_of,
)
from ..graph.matmul import FLOATS, Matmul, as_matmul, find_indivisible_size, is_matmul
from ..graph.sizes import Size, divide, is_same, is_same_shape, numel, squeezed
from ..joint.joint_decision import joint_decision
from ..plan.reasons import Reason
from .collectives import Collective
from .permutes import as_permute
from .scales import find_row_scale_gather, find_scale_gather, is_same_value
from .site import Consumer, Gather, GatheredAlias, GatheredScales, Miss


def match_all_gather(c: Collective, position: dict[Node, int]) -> Gather | Miss:
    """The consumers of one all_gather as a `Gather`, in graph order (`position`), or the exact reason why there are none."""
    if dtype_of(c.node) not in (*FLOATS, *FLOAT8, torch.uint8):
        wanted = "float32, bfloat16, float16 and float8"
        return Miss(Reason.DTYPE_UNSUPPORTED, f"gathers {dtype_of(c.node)}; {wanted} are overlapped")
    assert c.wait is not None
    return _Walk(c).result(position)


class _Walk:
    def __init__(self, c: Collective) -> None:
        self.c = c
        self.aliases: dict[Node, GatheredAlias] = {}
        self.uses: list[tuple[Node, Consumer, GatheredAlias]] = []
        self.others: list[Node] = []
        self.blocked: list[Miss] = []
        self.cuts: dict[Node, None] = {}
        self.scales: list[Node] = []
        assert c.wait is not None
        inner = divide(numel(shape_of(c.wait)), c.ranks)
        assert inner is not None, "an all_gather's output is a multiple of its ranks"
        todo = [c.wait]
        self.aliases[c.wait] = GatheredAlias(Blocks(1, c.ranks, inner), dtype_of(c.wait))
        if any(u is not c.wait for u in readers(c.node)):  # saved for backward, which waits itself
            self.aliases[c.node] = self.aliases[c.wait]
            self.others.append(c.node)
        while todo:
            node = todo.pop()
            for user in node.users:
                todo += self._user(node, self.aliases[node], user)

    def _user(self, node: Node, held: GatheredAlias, user: Node) -> list[Node]:
        """Files `user` under aliases, consumers or others; returns the new aliases."""
        if user in self.aliases or user.target is aten.sym_size.int:
            return []
        p = as_matmul(user)
        if p is not None and p.bias is not node:
            self._matmul(node, held, p)
            return []
        step = element_effect(user)
        if step is not None and step.source is not node:
            step = None  # only written over
        if step is None and (user.target in CUTS or user.target is aten.slice.Tensor):
            return self._cut(node, held, user)
        if step is not None and step.effect is Effect.CAST and held.dtype.itemsize == 1 and dtype_of(self.c.node).itemsize == 1:
            self.others.append(node)  # gathered float8 is scaled by what it is cast to
            return []
        if step is not None and step.effect is Effect.CAST and not _exact(dtype_of(self.c.node), held.dtype):
            self.others.append(node)
            self.blocked.append(Miss(Reason.CAST_IN_BETWEEN, f"{user.name} is a second cast, of values rounded by the first"))
            return []
        moved = _through(held, user, step.effect) if step else None
        if moved is None and not held.swapped and (turn := as_permute(user, held.blocks, reads=True)) is not None:
            moved = GatheredAlias(turn.blocks_after, held.dtype, permutes=(*held.permutes, turn))
        if moved is None:
            self.others.append(node)
            if is_matmul(user) and p is None:
                self.blocked.append(Miss(Reason.LAYOUT, f"{user.name} ({user.target}) is no single product: batched or scaled"))
            elif step is not None or user.target in (aten.permute.default, aten.expand.default):
                self.blocked.append(Miss(Reason.LAYOUT, f"{user.name} mixes the gathered dim with others"))
            elif (matmul := _product_behind(user)) is not None:
                if user.target is aten.constant_pad_nd.default:
                    self.blocked.append(Miss(Reason.UNEVEN_SHARDS, f"{user.name} pads or trims the gathered tensor"))
                    return []
                self.blocked.append(Miss(Reason.NON_LINEAR, f"{user.name} stands between the gather and {matmul.name}"))
            return []
        self.aliases[user] = moved
        return [user]

    def _cut(self, node: Node, held: GatheredAlias, cut: Node) -> list[Node]:
        """A split, chunk or slice: part of a regroup by a cat, or the end of the walk."""
        pieces = [cut] if cut.target is aten.slice.Tensor else list(cut.users)
        as_bytes = [u for p in pieces for u in p.users if u.target is aten.view.dtype and held.dtype.itemsize == 1]
        cats = {u for p in (*pieces, *as_bytes) for u in p.users if u.target is aten.cat.default}
        only_cats = all(u in cats or u in as_bytes for p in (*pieces, *as_bytes) for u in p.users)
        found: list[Node] = []
        for cat in cats:
            moved = self._regrouped(node, held, cat)
            if moved is None:
                only_cats = False
                self.blocked.append(
                    Miss(Reason.SHARD_ORDER, f"{cat.name} is no plain gather: it permutes, repeats or drops shards")
                )
            elif cat not in self.aliases:
                self.aliases[cat] = moved
                found.append(cat)
        if cats and only_cats:
            self.cuts.update(dict.fromkeys((cut, *pieces, *as_bytes)))
        else:
            self.others.append(node)
            if not cats:
                self.blocked.append(Miss(Reason.UNEVEN_SHARDS, f"{cut.name} trims or cuts the gathered tensor"))
        return found

    def _regrouped(self, node: Node, held: GatheredAlias, cat: Node) -> GatheredAlias | None:
        pieces = pieces_of(cat)
        group = match_regroup(pieces, self.c.ranks)
        if group is None or group[0] is not node or held.swapped:
            return None
        axis, dim, piece = group[1], dim_of(cat), shape_of(pieces[0])
        if not is_same(numel(piece[:axis]), held.blocks.outer) or not is_same(numel(piece[axis:]), held.blocks.inner):
            return None
        dtype = dtype_of(cat) if held.dtype.itemsize == 1 else held.dtype
        return GatheredAlias(Blocks(numel(piece[:dim]), self.c.ranks, numel(piece[dim:])), dtype, permutes=held.permutes)

    def _matmul(self, node: Node, held: GatheredAlias, p: Matmul) -> None:
        if p.scales is not None and (p.lhs.node is not node or held.swapped or held.dtype not in FLOAT8):
            self.others.append(node)
            if node in (p.lhs.node, p.rhs.node):
                self.blocked.append(
                    Miss(Reason.SCALED_FORM, f"{p.node.name}: float8 rows are gathered as the left operand only")
                )
            return
        for operand, other, lhs in ((p.lhs, p.rhs, True), (p.rhs, p.lhs, False)):
            if operand.node is not node:
                continue
            # The operand as the matmul reads it is G (or G^T where a permute came before).
            transpose_gathered, transpose_out = held.swapped == lhs, not lhs
            if held.swapped and not is_same_shape(squeezed((operand.cols, operand.rows)), squeezed(held.matrix)):
                self.others.append(node)
                self.blocked.append(Miss(Reason.LAYOUT, f"{p.node.name} reads another matrix than the permute before it made"))
                return
            self.uses.append((node, Consumer(p, transpose_gathered, transpose_out, other if lhs else other.t), held))
            return
        self.others.append(node)

    def _no_matmul(self) -> Miss:
        """Nobody multiplies the gathered elements here; of those that the graph returns, it says where else to look."""
        if why := joint_decision(self.c.node).why_unmatched:
            return Miss(*why)
        detail = "no matmul reads the gathered tensor"
        if any(u.op == "output" for n in self.aliases for u in n.users):
            detail += ", which leaves the graph: a matmul of another graph may (after a graph break or DDPOptimizer's split)"
        return Miss(Reason.NO_MATMUL, detail)

    def _scaled(self, k: Consumer, held: GatheredAlias, shard_dim_is_last: bool) -> object:
        """What tells consumers of differently scaled gathers apart: () for 16 bits."""
        scales, name = k.compute.scales, k.compute.node.name
        if scales is None:
            return ()
        if shard_dim_is_last:
            return Miss(Reason.SCALED_FORM, f"{name} sums over shards of its inner dim")
        if indivisible := find_indivisible_size(k.compute):
            return Miss(Reason.SIZES_NOT_16, f"{name}: {indivisible}")
        if not scales.rows:
            for known in self.scales:
                if is_same_value(known, scales.lhs):
                    return known, scales.fast
            self.scales.append(scales.lhs)
            return scales.lhs, scales.fast
        per_block = divide(held.blocks.inner, k.compute.lhs.cols)
        beside = find_row_scale_gather(self.c, held, per_block, scales.lhs, lambda c: _Walk(c).aliases)
        if beside is None:
            return Miss(Reason.SCALED_FORM, f"{name}: the scales of its rows are not gathered like the rows")
        return beside.node, scales.fast

    def _scales_beside(self, chosen: list[tuple[Node, Consumer, GatheredAlias]]) -> GatheredScales | None:
        products = [k.compute for _, k, _ in chosen]
        first = products[0].scales
        if first is None or not first.rows:
            return None
        c = find_scale_gather(first.lhs)
        assert c is not None, "rows_beside found it"
        walk, inside = _Walk(c), {p.node for p in products}
        roots = [
            n for n in walk.aliases if any(u not in inside and u not in walk.aliases and u not in walk.cuts for u in readers(n))
        ]
        return GatheredScales(c, walk.aliases[first.lhs].blocks, walk.aliases, tuple(roots), tuple(walk.cuts))

    def result(self, position: dict[Node, int]) -> Gather | Miss:
        groups: dict[object, list[tuple[Node, Consumer, GatheredAlias]]] = defaultdict(list)
        for use in self.uses:
            node, consumer, held = use
            rows, cols = _matrix(consumer)
            if consumer.operand.node in self.aliases:
                name = consumer.compute.node.name
                self.blocked.append(Miss(Reason.DEPENDENT_OPERAND, f"{name} multiplies the gathered tensor with itself"))
                self.others += [n for n in consumer.compute.node.all_input_nodes if n in self.aliases]
                continue
            if held.blocks.rows(rows, cols) is not None:
                shard_dim_is_last = False
            elif held.blocks.shard_dim_is_last(rows, cols):
                shard_dim_is_last = True
            else:
                self.blocked.append(
                    Miss(Reason.LAYOUT, f"{consumer.compute.node.name}: a shard is no block of its rows or columns")
                )
                self.others.append(node)
                continue
            scaled = self._scaled(consumer, held, shard_dim_is_last)
            if isinstance(scaled, Miss):
                self.blocked.append(scaled)
                self.others.append(node)
                continue
            groups[held.blocks.outer, shard_dim_is_last, rows, cols, held.dtype, held.permutes, scaled].append(use)
        if not groups:
            return self.blocked[0] if self.blocked else self._no_matmul()
        key, chosen = max(groups.items(), key=lambda kv: len(kv[1]))
        for other, uses in groups.items():
            if other != key:
                self.others += [u[0] for u in uses]
        _, shard_dim_is_last, rows, cols, dtype, permutes, _ = key  # type: ignore[misc]
        wire = dtype if dtype in FLOAT8 else dtype_of(self.c.node)
        if dtype.itemsize < wire.itemsize:  # the cast moves before the gather: fewer bytes travel, the numbers stay
            if others := {self.aliases[n].dtype for n in self.others} - {dtype}:
                wanted = ", ".join(sorted(map(str, others)))
                return Miss(Reason.CAST_IN_BETWEEN, f"multiplied as {dtype}, but others need the gathered tensor as {wanted}")
            wire = dtype
        elif dtype.itemsize == wire.itemsize and dtype != wire:
            return Miss(Reason.CAST_IN_BETWEEN, f"gathered as {wire}, multiplied as {dtype}")
        if dtype not in (*FLOATS, *FLOAT8):
            return Miss(Reason.DTYPE_UNSUPPORTED, f"multiplied as {dtype}")
        consumers = sorted((u[1] for u in chosen), key=lambda k: position[k.compute.node])
        return Gather(
            self.c,
            chosen[0][2].blocks,
            rows,
            cols,
            shard_dim_is_last,
            wire,
            tuple(consumers),
            self.aliases,
            tuple(dict.fromkeys(self.others)),
            permutes,
            tuple(self.cuts),
            self._scales_beside(chosen),
        )


def _product_behind(node: Node) -> Node | None:
    """The matmul that reads `node`, directly or through views."""
    todo, seen = [node], 0
    while todo and seen < 8:
        for user in todo.pop().users:
            seen += 1
            if is_matmul(user):
                return user
            if element_effect(user) is not None:
                todo.append(user)
    return None


def _matrix(consumer: Consumer) -> tuple[Size, Size]:
    """[rows, cols] of G as this consumer needs it."""
    p = consumer.compute
    if consumer.transpose_out:
        return (p.rhs.rows, p.rhs.cols) if consumer.transpose_gathered else (p.rhs.cols, p.rhs.rows)
    return (p.lhs.cols, p.lhs.rows) if consumer.transpose_gathered else (p.lhs.rows, p.lhs.cols)


def _exact(wire: torch.dtype, dtype: torch.dtype) -> bool:
    """Does a cast from `wire`, one of FLOATS, to `dtype` keep every value?"""
    return dtype in (wire, torch.float32, torch.float64)


def _through(held: GatheredAlias, user: Node, kind: Effect) -> GatheredAlias | None:
    """`held` after a view, a transposition or a cast, or None where the order of elements is lost."""
    shape = squeezed(shape_of(user))
    if kind is Effect.CAST:
        dtype = tensor_of(user).dtype  # type: ignore[union-attr]
        return replace(held, dtype=dtype) if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None
    if kind is Effect.BITS:
        return replace(held, dtype=dtype_of(user))
    if kind is Effect.SAME:
        if held.swapped and not is_same_shape(shape, squeezed(held.matrix)[::-1]):
            return None
        return held
    if held.swapped:
        return replace(held, matrix=()) if is_same_shape(shape, squeezed(held.matrix)) else None
    return replace(held, matrix=shape[::-1])
