"""The pass on the joint graph: 16-bit linears become scaled products of float8 twins.

    x bf16 -> all_gather -> view -> mm(., w^T)           x -> quantise -> all_gather(q) -> view -> _scaled_mm(., wq^T, s, ws)
                              |                     =>                                      |
                              +-> mm(dy^T, .)             dy -> quantise -> transposed copy -+-> transposed copy -> _scaled_mm

What is quantised is decided here, how in twins.py and quantise.py. Every product that is looked at carries a `Cast` in its
meta: the plan of the graph it ends up in lists it, with the reason where it stays in high precision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..cost.of_site import hints_of
from ..cost.profile import Profile
from ..joint import needs_tangents
from ..origin import module_of
from ..plan import Cast, Reason
from ..rewrite.emit import Emitter
from ..sites.matmuls import Operand, Product
from ..sites.sizes import Size, divide, text
from ..sites.values import aten, dtype_of, shape_of
from .linears import Linear, Role, linears
from .origin import Axis, step_back
from .recipe import NARROW, Recipe
from .travel import travelling
from .twins import Twins
from .worth import weigh

log = logging.getLogger(__name__)

CAST = "ub_overlap_fp8"
"""Key of node.meta: the Cast of a product."""
MULTIPLE = 16
Filter = Callable[[str, tuple[int, int]], bool]
Verdict = tuple[Reason, str] | None
Slower = Callable[[Linear, list[Product]], str]


@dataclass(frozen=True, slots=True)
class Fp8:
    """What the options ask for. `backward`: gradients too."""

    recipe: Recipe
    backward: bool
    filter: Filter | None = None
    profile: Profile | None = None
    """What tells whether a linear is faster in float8; None: nobody asks."""


def insert(graph: Graph, fp8: Fp8) -> int:
    """Rewrites in place; returns how many products became scaled ones."""
    gradients = needs_tangents(graph)
    found = linears(graph, gradients)
    if not found:
        return 0
    slower = None
    if fp8.profile is not None:
        dtype = str(dtype_of(found[0].forward.node)).removeprefix("torch.")
        slower = weigh(found, fp8.recipe, fp8.profile, hints_of(graph), dtype)
    scaled, high, casts = _choose(found, fp8, slower)
    for node, cast in casts.items():
        node.meta[CAST] = cast
    if not scaled:
        return 0
    rows = fp8.recipe.rows

    def wanted(reader: Node, value: Node) -> list[Axis] | None:
        p = scaled.get(reader)
        if p is not None:
            return [_axis(o, last, rows) for o, last in ((p.lhs, True), (p.rhs, False)) if o.node is value]
        if reader in high or (reader.target is aten.sum.dim_IntList and value in gradients):  # a bias gradient
            return [_natural(value, rows)]
        return None

    twins = Twins(graph, travelling(graph, wanted, scaled), gradients, fp8.recipe.gradient, {linear.weight for linear in found})
    for node in sorted(scaled):
        _scale(graph, scaled[node], twins, rows, casts[node])
    for reader in sorted(high):
        _read_twins(reader, twins, rows, kept=lambda value: value not in gradients)
    for reader in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        _read_twins(reader, twins, rows, kept=lambda value: False)
    dead = sorted((*scaled, *twins.replaced), reverse=True)
    while gone := [n for n in dead if not n.users]:
        for node in gone:
            graph.erase_node(node)
        dead = [n for n in dead if n not in gone]
    compat.stable_topological_sort(graph)
    return len(scaled)


def _choose(
    found: list[Linear], fp8: Fp8, slower: Slower | None
) -> tuple[dict[Node, Product], dict[Node, Product], dict[Node, Cast]]:
    """(products to scale, weight gradients in high precision whose activation is quantised, what is said about each)."""
    scaled: dict[Node, Product] = {}
    high: dict[Node, Product] = {}
    verdicts: dict[Node, Verdict] = {}
    roles: dict[Node, tuple[Role, Product, str]] = {}
    for linear in found:
        module = module_of(linear.forward.node)
        whole = _verdict(linear, module, fp8, slower)
        for role, p in linear.products:
            verdict = whole or _of_product(role, p, fp8)
            # Of several owners the strictest decides.
            verdicts[p.node] = verdicts.get(p.node) or verdict
            roles.setdefault(p.node, (role, p, module))
            if role is Role.WEIGHT_GRADIENT and whole is None:
                high[p.node] = p
    for node, verdict in verdicts.items():
        if verdict is None:
            scaled[node] = roles[node][1]
            high.pop(node, None)
    casts = {n: _cast(*roles[n], verdicts[n], fp8.recipe) for n in verdicts}
    return scaled, high, casts


def _verdict(linear: Linear, module: str, fp8: Fp8, slower: Slower | None) -> Verdict:
    """Why a whole linear stays as it is."""
    p = linear.forward
    if fp8.filter is not None and not fp8.filter(module, (p.shape[1], p.inner)):
        return Reason.FILTERED, f"fp8_filter refuses {module or 'it'} {text((p.shape[1], p.inner))}"
    if dtype_of(p.node) not in NARROW:
        return Reason.DTYPE_UNSUPPORTED, f"{dtype_of(p.node)} is asked for"
    if (odd := _odd(p)) is not None:
        return odd
    if slower is not None:
        products = [q for role, q in linear.products if _of_product(role, q, fp8) is None]
        if why := slower(linear, products):
            return Reason.NO_GAIN, why
    return None


def _of_product(role: Role, p: Product, fp8: Fp8) -> Verdict:
    if role is not Role.FORWARD and not fp8.backward:
        return Reason.RECIPE, "fp8='forward' leaves backward in high precision"
    if role is Role.WEIGHT_GRADIENT and not fp8.recipe.weight_gradient:
        return Reason.RECIPE, f"{fp8.recipe.name}: the sum runs over the rows, each of which has a scale of its own"
    return _odd(p)


def _odd(p: Product) -> Verdict:
    for what, size in (("inner dim", p.inner), ("columns", p.shape[1])):
        if divide(size, MULTIPLE) is None:
            return Reason.SIZES_NOT_16, f"{what} {size} do not divide by {MULTIPLE}"
    return None


def _cast(role: Role, p: Product, module: str, verdict: Verdict, recipe: Recipe) -> Cast:
    return Cast(
        node=p.node.name,
        role=role.value,
        module=module,
        shape=f"{text((p.shape[0], p.inner))} @ {text((p.inner, p.shape[1]))}",
        recipe="" if verdict else recipe.name,
        reason=verdict[0] if verdict else None,
        detail=verdict[1] if verdict else "",
    )


def _axis(operand: Operand, last: bool, rows: bool) -> Axis:
    """The axis of `operand.node` that the product sums over; `last`: it is the matrix's last."""
    return (-1 if last != operand.swapped else -2) if rows else None


def _natural(node: Node, rows: bool) -> Axis:
    """The axis that is the last dim where the elements come from: that of the forward's twin."""
    if not rows:
        return None
    here, axis = node, -1
    while (found := step_back(here, axis)) is not None:
        here, axis = found[0], found[1]  # type: ignore[assignment]
    return axis


def _matrix(e: Emitter, operand: Operand, twins: Twins, last: bool, rows: bool) -> tuple[Node, Node]:
    """(q, scale) of an operand as the product reads it: 2D; scale [] or [r, 1] or [1, c]."""
    axis = _axis(operand, last, rows)
    twin = twins.of(operand.node, axis)
    q, scale = e.reshape(twin.q, operand.shape), twin.scale
    if axis is not None:
        scale = _column(e, scale, operand.shape[0]) if axis == -1 else e.reshape(scale, (1, operand.shape[1]))
    return (e.transpose(q), e.transpose(scale) if axis is not None else scale) if operand.swapped else (q, scale)


def _column(e: Emitter, scale: Node, rows: Size) -> Node:
    """[rows, 1] with strides of 1, as torch's kernels ask for: in a dim of size 1 Inductor would choose any."""
    if not isinstance(rows, int):
        return e.reshape(scale, (rows, 1))
    return e.call(aten.as_strided.default, e.call(aten.reshape.default, scale, [-1]), [rows, 1], [1, 1])


def _scale(graph: Graph, p: Product, twins: Twins, rows: bool, cast: Cast) -> None:
    """Replaces one product."""
    node, dtype = p.node, dtype_of(p.node)
    twins.reader = node
    # Scales of rows give bfloat16 on every torch; a bias must have the result's type, and float32 takes none.
    result = torch.bfloat16 if rows else dtype
    inside = (
        p.bias if p.bias is not None and len(shape_of(p.bias)) == 1 and dtype_of(p.bias) == result != torch.float32 else None
    )
    with graph.inserting_before(node):
        e = Emitter(graph, node, {})
        a, a_scale = _matrix(e, p.lhs, twins, True, rows)
        b, b_scale = _matrix(e, p.rhs, twins, False, rows)
        a, b = twins.matrix(a, True), twins.matrix(b, False)
        fast = cast.role == Role.FORWARD.value
        value = e.call(aten._scaled_mm.default, a, b, a_scale, b_scale, inside, None, result, fast)
        value.meta[CAST] = cast
        value = e.cast(value, dtype)
        if p.bias is not None and inside is None:
            value = e.call(aten.add.Tensor, value, p.bias)
        value = e.reshape(value, shape_of(node))
    node.replace_all_uses_with(value)


def _read_twins(reader: Node, twins: Twins, rows: bool, kept: Callable[[Node], bool]) -> None:
    """Lets `reader`, in high precision, read what was quantised for others, so that nothing else is gathered or `kept`."""
    twins.reader = reader
    for value in reader.all_input_nodes:
        axis = _natural(value, rows)
        if twins.travelled(value) or (kept(value) and twins.has(value, axis)):
            reader.replace_input_with(value, twins.value(value, axis))
