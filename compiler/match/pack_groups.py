"""Pack groups: matmuls of one site whose operands, side by side in one matrix, make one matmul.

    gathered    G @ B1, G @ B2               ->  G @ [B1 | B2]           the results are slices of one result
    summed      A1 @ B1 + A2 @ B2            ->  [A1 | A2] @ [B1; B2]    the inner dim adds up inside of the matmul
    gradients   B1^T @ G, B2^T @ G           ->  [B1 | B2]^T @ G         the results are blocks of rows of one result

Float8 matmuls of one gather share the scales of its rows. With a scale for each column of an operand, joined operands have
joined scales. No other form is legal in float8: an operand with one scale for all of it cannot be joined with another, and
neither can the terms of a sum, whose rows have scales of their own.

This file lists the forms that are legal. select/pack_choice.py chooses one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from ..graph.aten import dtype_of, shape_of
from ..graph.graph_inputs import NO_NEIGHBORS, Neighbors
from ..graph.matmul import Matmul, Operand
from ..graph.operand_source import find_source
from ..graph.sizes import about, is_same_shape, numel
from .site import Bulk, Consumer, Fused, Gather, Reduction, Site, Split

PackedSite = Gather | Reduction
T = TypeVar("T")


def packed_forms(site: Site, neighbors: Neighbors = NO_NEIGHBORS) -> list[PackedSite]:
    """Return `site` with its pack groups: whole ones first, then without their largest, their two largest, ...

    A large matmul gains little from a pack, and its operand is the dearest to copy. `neighbors`: weights that need no copy.
    """
    if isinstance(site, Bulk | Split | Fused) or not (groups := _groups(site)):
        return []
    return [
        _packed(
            site,
            [sorted(group, key=lambda i: (_size(site, i), i))[: max(0, len(group) - dropped)] for group in groups],
            neighbors,
        )
        for dropped in range(max(map(len, groups)) - 1)
    ]


def one_matmul(forms: Sequence[PackedSite]) -> PackedSite | None:
    """Return the one of a site's packed forms whose own matmuls are all one; None if there is none."""
    return next((form for form in forms if len(form.packs) == 1), None)


def explain_unpacked(site: Site) -> str:
    """Return why a site of several matmuls has no pack group; "" where it has one, or a single matmul."""
    if isinstance(site, Bulk | Split | Fused) or _count(site) < 2:
        return ""
    scales = _own_matmuls(site)[0].scales
    if isinstance(site, Reduction):
        return "" if scales is None else "not packed: each term of a float8 sum has scales of its own"
    if scales is not None and not scales.rows:
        return "not packed: each operand has one scale; float8 is packed with scales of rows only, whose matmuls take longer"
    if _groups(site):
        return ""
    if scales is not None:
        return "not packed: the float8 matmuls differ in type or bias, or their columns are dynamic"
    orientations = {(k.transpose_gathered, k.transpose_out) for k in site.consumers}
    alike = len(orientations) < len(site.consumers)
    return "not packed: the matmuls of one orientation differ in type, or their columns are dynamic" if alike else ""


def _groups(site: PackedSite) -> list[list[int]]:
    """The indices of matmuls that can share an operand, by what they must have in common; two or more each."""
    groups: dict[object, list[int]] = {}
    if isinstance(site, Gather):
        for i, k in enumerate(site.consumers):
            if isinstance(k.operand.cols, int) and _has_scales_by_line(k):  # `cols`: the offsets of the parts
                groups.setdefault((k.transpose_gathered, k.transpose_out, *_types(k)), []).append(i)
    else:
        for i, term in enumerate(site.terms):
            if term.scales is None:
                groups.setdefault(dtype_of(term.node), []).append(i)
    return [group for group in groups.values() if len(group) > 1]


def _has_scales_by_line(consumer: Consumer) -> bool:
    """Return whether the columns of the operand have scales of their own, or no scales (16 bits)."""
    scales = consumer.compute.scales
    return scales is None or scales.rows


def _types(consumer: Consumer) -> tuple[object, ...]:
    """The types of operand and result, and whether the op adds a bias. It adds those of float8 only.

    Consumers of one site have the same scales of rows, and the same accumulation (consumer_groups.py).
    """
    matmul = consumer.compute
    adds_bias = matmul.scales is not None and matmul.bias is not None
    return dtype_of(consumer.operand.node), dtype_of(matmul.node), adds_bias


def _own_matmuls(site: PackedSite) -> tuple[Matmul, ...]:
    """The site's own matmuls: independent ones have no operand in common with them."""
    return tuple(k.compute for k in site.consumers) if isinstance(site, Gather) else site.terms


def _count(site: PackedSite) -> int:
    return len(_own_matmuls(site))


def _size(site: PackedSite, index: int) -> int:
    """The size of a matmul along the packed dim, rounded: ranks may differ a little. 0 where it is dynamic."""
    size = site.consumers[index].operand.cols if isinstance(site, Gather) else site.terms[index].inner
    return about(size) if isinstance(size, int) else 0


def _packed(site: PackedSite, groups: Sequence[Sequence[int]], neighbors: Neighbors) -> PackedSite:
    """Return `site` with the members of each group of two or more next to each other.

    They are in the order of their weights in memory where these are next to each other, else in graph order.
    """
    first = {min(group): sorted(group) for group in groups if len(group) > 1}
    inside = {i for group in first.values() for i in group}
    order = [first.get(i, [i]) for i in range(_count(site)) if i in first or i not in inside]
    lhs, dim = ("", 1) if isinstance(site, Gather) else ("lhs", 0)
    rights = [k.operand for k in site.consumers] if isinstance(site, Gather) else [term.rhs for term in site.terms]
    copies: list[str] = []
    for number, group in enumerate(order):
        if len(group) == 1:
            copies.append("")
            continue
        adjacent = order_in_memory([rights[i] for i in group], dim, neighbors)
        order[number] = [group[i] for i in adjacent] if adjacent else group
        copies.append(lhs if adjacent else "+".join(filter(None, (lhs, "rhs"))))
    packs, flat = tuple(map(len, order)), [i for group in order for i in group]
    if isinstance(site, Gather):
        return replace(site, consumers=tuple(site.consumers[i] for i in flat), packs=packs, pack_copies=tuple(copies))
    return replace(site, terms=tuple(site.terms[i] for i in flat), packs=packs, pack_copies=tuple(copies))


def order_in_memory(operands: Sequence[Operand], dim: int, neighbors: Neighbors) -> list[int] | None:
    """Return the order of `operands`, joined along `dim`, as weights next to each other in memory. None if they are not."""
    sources = [find_source(operand) for operand in operands]
    # Rows of the stored matrices follow each other: the columns of matrices that are stored transposed.
    if not all(s.node in neighbors and s.is_transposed == (dim == 1) for s in sources):
        return None
    if not all(is_same_shape(shape_of(s.node), s.shape) for s in sources):
        return None
    order = sorted(range(len(sources)), key=lambda i: neighbors[sources[i].node])
    storage, end = neighbors[sources[order[0]].node]
    for i in order:
        if neighbors[sources[i].node] != (storage, end):
            return None
        end += numel(sources[i].shape)
    return order


def consumer_packs(site: Gather) -> list[tuple[Consumer, ...]]:
    """Return the consumers by the matmul of the op that computes them."""
    return _cut(site.consumers, site.packs)


def term_packs(site: Reduction) -> list[tuple[Matmul, ...]]:
    """Return the terms by the matmul of the op that computes them."""
    return _cut(site.terms, site.packs)


def _cut(values: tuple[T, ...], packs: tuple[int, ...]) -> list[tuple[T, ...]]:
    parts = zip(packs, accumulate(packs), strict=True)
    return [values[end - size : end] for size, end in parts] if packs else [(v,) for v in values]
