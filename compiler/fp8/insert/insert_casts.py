"""The pass on the joint graph: 16-bit linears become scaled products of float8 twins.

    x bf16 -> all_gather -> view -> mm(., w^T)           x -> quantise -> all_gather(q) -> view -> _scaled_mm(., wq^T, s, ws)
                              |                     =>                                      |
                              +-> mm(dy^T, .)             dy -> quantise -> transposed copy -+-> transposed copy -> _scaled_mm

What is quantised is decided here, how in twins.py and quantise.py. Every product that is looked at carries a `CastDecision` in its
meta: the plan of the graph it ends up in lists it, with the reason where it stays in high precision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ...cost.profile import Profile
from ...cost.site_sizes import hints_of
from ...graph.aten import aten, dtype_of, pieces_of, shape_of, tensor_of
from ...graph.dtensor_sizes import LocalSizes
from ...graph.emitter import Emitter, find_size_source
from ...graph.erase import erase_unread
from ...graph.joint_graph import needs_tangents
from ...graph.matmul import FLOAT8_MULTIPLE, Matmul, Operand, find_indivisible_size
from ...graph.sizes import Size, format_shape, is_same_shape
from ...graph.source_location import module_path
from ...joint.joint_decision import record_decision
from ...plan.decision import CastDecision
from ...plan.reasons import Reason
from ..cast_nodes import cast_down, keep, scale_of
from ..provenance import Axis, before, origin, step_back
from ..quantized_values import QuantizedValue, QuantizedValues
from ..recipe import NARROW, Recipe
from ..state.cached_weights import CachedWeights
from ..state.delayed_scaling import Delayed
from .fp8_profitability import weigh
from .gather_legality import travelling
from .linears import Linear, Role, linears

log = logging.getLogger(__name__)

Filter = Callable[[str, tuple[int, int]], bool]
Verdict = tuple[Reason, str] | None
Slower = Callable[[Linear, list[Matmul]], str]


@dataclass(frozen=True, slots=True)
class Fp8:
    """What the options ask for. `backward`: gradients too."""

    recipe: Recipe
    backward: bool
    filter: Filter | None = None
    profile: Profile | None = None
    """What tells whether a linear is faster in float8; None: nobody asks."""
    state: str = ""
    """Names the histories of delayed scales."""
    kept: Collection[Node] = ()
    """Inputs of the graph whose casts outlive calls (runtime/fp8/weight_cache/)."""
    verify: bool = False
    """Each product runs in 16 bits as well and is compared (runtime/verify.py)."""
    uneven: Mapping[Node, LocalSizes] = field(default_factory=dict)
    """Inputs of the graph that ranks hold different sizes of."""


def insert_casts(graph: Graph, fp8: Fp8) -> int:
    """Rewrites in place; returns how many products became scaled ones."""
    gradients = needs_tangents(graph)
    found = linears(graph, gradients)
    if not found:
        return 0
    slower = None
    if fp8.profile is not None:
        dtype = str(dtype_of(found[0].forward.node)).removeprefix("torch.")
        slower = weigh(found, fp8.recipe, fp8.profile, hints_of(graph), dtype, bool(fp8.kept))
    # The forward half must not ask a tangent for a size.
    inputs = [n for n in graph.find_nodes(op="placeholder") if n not in gradients]
    scaled, high, casts = _choose(found, fp8, slower, inputs)
    for node, cast in casts.items():
        record_decision(node, cast=cast)
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

    weights = {linear.weight for linear in found}
    # Of all linears, so that graphs of the same modules know them by the same ones, whichever products they refuse.
    first = {linear.weight.meta["val"].device: linear.weight for linear in reversed(found)}
    kept = CachedWeights(weights & set(fp8.kept))
    delayed = Delayed(graph, inputs, fp8.state, step=bool(gradients)) if fp8.recipe.delayed else None

    def quantise(e: Emitter, value: Node, axis: Axis, groups: tuple[str, ...]) -> QuantizedValue:
        if not groups and kept.source(value) is not None:
            return kept.twin(e, value, axis, twins.after)
        format = fp8.recipe.gradient if value in gradients else torch.float8_e4m3fn
        if delayed is not None and origin(value) not in weights:
            module = casts[twins.reader].module if twins.reader in casts else module_path(twins.reader)
            name = f"{module}/{'dy' if value in gradients else 'x'}"
            weight = first[value.meta["val"].device]
            return delayed.twin(e, value, name, format, groups, weight, backward=value in gradients)
        scale = scale_of(e, value, format, None if axis is None else len(shape_of(value)) + axis, groups)
        q = cast_down(e, value, scale, format)
        if value in weights:  # cast once: backward does not read the 16 bits again
            keep(q)
        return QuantizedValue(q, scale)

    twins = QuantizedValues(graph, travelling(graph, wanted, scaled), quantise, inputs, apart=kept.holds)
    made = {node: _scaled(scaled[node], twins, rows, casts[node]) for node in sorted(scaled)}
    for reader in sorted(high):
        _read_twins(reader, twins, rows, kept=lambda value: value not in gradients)
    for reader in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        _read_twins(reader, twins, rows, kept=lambda value: False)
    for node, value in made.items():  # not before: what is quantised of one linear's result for the next reads the old node
        _replace(graph, node, value, casts[node] if fp8.verify else None)
    if delayed is not None:
        delayed.finish()
    erase_unread(graph, (*scaled, *twins.replaced))
    compat.stable_topological_sort(graph)
    return len(scaled)


def _choose(
    found: list[Linear], fp8: Fp8, slower: Slower | None, inputs: Sequence[Node]
) -> tuple[dict[Node, Matmul], dict[Node, Matmul], dict[Node, CastDecision]]:
    """(products to scale, weight gradients in high precision whose activation is quantised, what is said about each)."""
    scaled: dict[Node, Matmul] = {}
    high: dict[Node, Matmul] = {}
    verdicts: dict[Node, Verdict] = {}
    roles: dict[Node, tuple[Role, Matmul, str]] = {}
    for linear in found:
        module = module_path(linear.forward.node)
        whole = _verdict(linear, module, fp8, slower)
        for role, p in linear.products:
            verdict = whole or _of_product(role, p, fp8) or _unknown(inputs, p, fp8.recipe.rows)
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
        return Reason.FILTERED, f"the fp8 filter refuses {module or 'it'} {format_shape((p.shape[1], p.inner))}"
    if dtype_of(p.node) not in NARROW:
        return Reason.DTYPE_UNSUPPORTED, f"{dtype_of(p.node)} is asked for"
    if fp8.recipe.rows and _on_cpu(p.node) and not compat.cpu_scales_rows():
        return Reason.RECIPE, f"{fp8.recipe.name}: this torch's CPU multiplies float8 by one scale a tensor alone"
    if (odd := _odd_somewhere(fp8.uneven.get(linear.weight, ())) or _odd(p)) is not None:
        return odd
    if slower is not None:
        products = [q for role, q in linear.products if _of_product(role, q, fp8) is None]
        if why := slower(linear, products):
            return Reason.NO_GAIN, why
    return None


def _on_cpu(node: Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.device.type == "cpu"


def _of_product(role: Role, p: Matmul, fp8: Fp8) -> Verdict:
    if role is not Role.FORWARD and not fp8.backward:
        return Reason.RECIPE, "fp8='forward' leaves backward in high precision"
    if role is Role.WEIGHT_GRADIENT and not fp8.recipe.weight_gradient:
        return Reason.RECIPE, f"{fp8.recipe.name}: the sum runs over the rows, each of which has a scale of its own"
    return _odd(p)


def _odd_somewhere(weight: LocalSizes) -> Verdict:
    """What a rank gathers in float8 no other may gather in 16 bits: one rank's columns decide for all."""
    for sizes in weight:
        if len(sizes) > 1 and any(size % FLOAT8_MULTIPLE or size == 0 for size in sizes):
            return (
                Reason.SIZES_NOT_16,
                f"the ranks hold {', '.join(map(str, sizes))} of the weight: not all divide by {FLOAT8_MULTIPLE}",
            )
    return None


def _odd(p: Matmul) -> Verdict:
    if indivisible := find_indivisible_size(p, dynamic=True):
        return Reason.SIZES_NOT_16, indivisible
    for what, size in (("inner dim", p.inner), ("columns", p.shape[1])):
        if isinstance(size, int) and size == 0:
            return Reason.SIZES_NOT_16, f"{what} 0: nothing to multiply"
    return None


def _unknown(inputs: Sequence[Node], p: Matmul, rows: bool) -> Verdict:
    """A size that must be written down in front of the product, and that no input of the graph has."""
    for size in _written(p, rows):
        if find_size_source(inputs, size) is None:
            return Reason.DYNAMIC_SHAPE, f"size {size} cannot be computed from the graph's inputs"
    return None


def _written(p: Matmul, rows: bool) -> Iterator[Size]:
    """The sizes that emitting the scaled product may have to say: those of shapes with several dynamic ones, as a reshape
    finds out one by itself, those of what is regrouped, and of scales of rows."""
    shapes = [shape_of(p.node)]
    for operand in (p.lhs, p.rhs):
        if not is_same_shape(operand.shape, shape_of(operand.node)):
            shapes.append(operand.shape)
        node: Node | None = operand.node
        while node is not None:
            if node.target is aten.cat.default:
                yield from shape_of(pieces_of(node)[0])
            if rows:
                shapes.append(shape_of(node))
            node = before(node)
    if rows:
        yield p.shape[0]
    for shape in shapes:
        dynamic = [size for size in shape if not isinstance(size, int)]
        if len(dynamic) > 1:
            yield from dynamic


def _cast(role: Role, p: Matmul, module: str, verdict: Verdict, recipe: Recipe) -> CastDecision:
    return CastDecision(
        node=p.node.name,
        role=role.value,
        module=module,
        shape=f"{format_shape((p.shape[0], p.inner))} @ {format_shape((p.inner, p.shape[1]))}",
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


def _matrix(e: Emitter, operand: Operand, twins: QuantizedValues, last: bool, rows: bool) -> tuple[Node, Node]:
    """(q, scale) of an operand as the product reads it: 2D; scale [] or [r, 1] or [1, c]."""
    axis = _axis(operand, last, rows)
    twin = twins.of(operand.node, axis)
    q, scale = e.reshape(twin.q, operand.shape), twin.scale
    if axis is not None:
        scale = _column(e, scale, operand.shape[0]) if axis == -1 else e.reshape(scale, (1, operand.shape[1]))
    return (e.transpose(q), e.transpose(scale) if axis is not None else scale) if operand.swapped else (q, scale)


def _operands(e: Emitter, p: Matmul, twins: QuantizedValues, rows: bool, backward: bool) -> list[tuple[Node, Node]]:
    """Both, in their order. In backward the gradient is first at hand, and a weight beside it is asked for after that; not
    after a gather of it, which would have to be there before the product begins."""
    sides = [(p.lhs, True), (p.rhs, False)]
    made: dict[bool, tuple[Node, Node]] = {}
    for operand, last in sorted(sides, key=lambda side: twins.apart(side[0].node)):
        made[last] = _matrix(e, operand, twins, last, rows)
        twins.after = origin(twins.of(operand.node, _axis(operand, last, rows)).scale) if backward else None
    twins.after = None
    return [made[True], made[False]]


def _column(e: Emitter, scale: Node, rows: Size) -> Node:
    """[rows, 1] with strides of 1, as torch's kernels ask for: in a dim of size 1 Inductor would choose any."""
    return e.call(aten.as_strided.default, e.call(aten.reshape.default, scale, [-1]), [e.size(rows), 1], [1, 1])


def _scaled(p: Matmul, twins: QuantizedValues, rows: bool, cast: CastDecision) -> Node:
    """What takes the place of one product."""
    node, dtype = p.node, dtype_of(p.node)
    twins.reader = node
    # Scales of rows give bfloat16 on every torch; a bias must have the result's type, and float32 takes none.
    result = torch.bfloat16 if rows else dtype
    inside = (
        p.bias if p.bias is not None and len(shape_of(p.bias)) == 1 and dtype_of(p.bias) == result != torch.float32 else None
    )
    with twins.emitter(node) as e:
        (a, a_scale), (b, b_scale) = _operands(e, p, twins, rows, backward=cast.role != Role.FORWARD.value)
        a, b = twins.matrix(a, True), twins.matrix(b, False)
        fast = cast.role == Role.FORWARD.value
        value = e.call(aten._scaled_mm.default, a, b, a_scale, b_scale, inside, None, result, fast)
        record_decision(value, cast=cast)
        value.meta |= {k: node.meta[k] for k in ("recompute", "ac_graph_id") if k in node.meta}  # kept, if the user keeps it
        value = e.cast(value, dtype)
        if p.bias is not None and inside is None:
            value = e.call(aten.add.Tensor, value, p.bias)
        return e.reshape(value, shape_of(node))


def _replace(graph: Graph, node: Node, value: Node, verified: CastDecision | None) -> None:
    """`verified`: the product stays beside, for comparison."""
    if verified is None:
        node.replace_all_uses_with(value)
        return
    with graph.inserting_after(node):
        compared = Emitter(graph, node, {}).call(torch.ops.ub_overlap.compare.default, value, node, verified.key, True)
    node.replace_all_uses_with(compared, delete_user_cb=lambda user: user is not compared)
    record_decision(node, cast=None)


def _read_twins(reader: Node, twins: QuantizedValues, rows: bool, kept: Callable[[Node], bool]) -> None:
    """Lets `reader`, in high precision, read what was quantised for others, so that nothing else is gathered or `kept`."""
    twins.reader = reader
    for value in reader.all_input_nodes:
        axis = _natural(value, rows)
        if twins.travelled(value) or (kept(value) and twins.has(value, axis)):
            reader.replace_input_with(value, twins.value(value, axis))
