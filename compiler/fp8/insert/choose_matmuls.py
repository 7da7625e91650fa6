"""Choose which matmuls of a graph's linears become float8, with a reason for each of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ub_overlap import _torch_compat as compat

from ...graph.aten import aten, dtype_of, pieces_of, shape_of, tensor_of
from ...graph.dtensor_sizes import LocalSizes
from ...graph.matmul import FLOAT8_MULTIPLE, Matmul, find_indivisible_size
from ...graph.sizes import Size, format_shape, is_same_shape
from ...graph.source_location import module_path
from ...plan.decision import CastDecision
from ...plan.reasons import Reason
from ..emitted_sizes import find_unknown_size, sizes_to_emit
from ..provenance import element_source
from ..recipe import NARROW, Recipe
from .fp8_profitability import Fp8Profitability
from .insert_config import InsertConfig
from .linears import Linear, Role

Refusal = tuple[Reason, str]
"""(reason, detail) why a matmul stays in high precision."""


@dataclass(frozen=True, slots=True)
class ChosenMatmuls:
    """The matmuls of all linears of a graph, by node."""

    scaled: dict[Node, Matmul]
    """Those that become float8."""
    high_precision: dict[Node, Matmul]
    """Weight gradients that stay in high precision, but whose activation is quantized."""
    decisions: dict[Node, CastDecision]
    """The report's record of each."""


def choose_matmuls(
    linears: list[Linear], config: InsertConfig, profitability: Fp8Profitability | None, inputs: Sequence[Node]
) -> ChosenMatmuls:
    """Choose among the matmuls of `linears`. `inputs`: the graph inputs that sizes may be read from."""
    scaled: dict[Node, Matmul] = {}
    high_precision: dict[Node, Matmul] = {}
    refusals: dict[Node, Refusal | None] = {}
    roles: dict[Node, tuple[Role, Matmul, str]] = {}
    for linear in linears:
        module = module_path(linear.forward.node)
        of_linear = _refuse_linear(linear, module, config, profitability)
        for role, matmul in linear.matmuls:
            refusal = of_linear or _refuse_role(role, matmul, config) or _refuse_size(inputs, matmul, config.recipe.per_row)
            # The strictest of several owners decides.
            refusals[matmul.node] = refusals.get(matmul.node) or refusal
            roles.setdefault(matmul.node, (role, matmul, module))
            if role is Role.WEIGHT_GRADIENT and of_linear is None:
                high_precision[matmul.node] = matmul
    for node, refusal in refusals.items():
        if refusal is None:
            scaled[node] = roles[node][1]
            high_precision.pop(node, None)
    decisions = {node: _decision(*roles[node], refusals[node], config.recipe) for node in refusals}
    return ChosenMatmuls(scaled, high_precision, decisions)


def _refuse_linear(linear: Linear, module: str, config: InsertConfig, profitability: Fp8Profitability | None) -> Refusal | None:
    """Return why all matmuls of a linear stay in high precision."""
    forward = linear.forward
    weight_shape = (forward.shape[1], forward.inner)
    if config.filter is not None and not config.filter(module, weight_shape):
        return Reason.FILTERED, f"the fp8 filter refuses {module or 'it'} {format_shape(weight_shape)}"
    if dtype_of(forward.node) not in NARROW:
        return Reason.DTYPE_UNSUPPORTED, f"the matmul is in {dtype_of(forward.node)}: only 16-bit matmuls become float8"
    if config.recipe.per_row and _is_on_cpu(forward.node) and not compat.cpu_scales_rows():
        return Reason.RECIPE, f"{config.recipe.name}: this torch has per-tensor scales only on the CPU"
    uneven = _refuse_uneven_weight(config.uneven_inputs.get(linear.weight, ()))
    if (refusal := uneven or _refuse_multiple(forward)) is not None:
        return refusal
    if profitability is not None:
        matmuls = [m for role, m in linear.matmuls if _refuse_role(role, m, config) is None]
        if why := profitability.explain_slowdown(linear, matmuls):
            return Reason.NO_GAIN, why
    return None


def _is_on_cpu(node: Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.device.type == "cpu"


def _refuse_role(role: Role, matmul: Matmul, config: InsertConfig) -> Refusal | None:
    if role is not Role.FORWARD and not config.backward:
        return Reason.RECIPE, "fp8='forward' leaves backward in high precision"
    if role is Role.WEIGHT_GRADIENT and not config.recipe.fp8_weight_gradient:
        return Reason.RECIPE, f"{config.recipe.name}: a weight gradient sums over the rows, each of which has its own scale"
    return _refuse_multiple(matmul)


def _refuse_uneven_weight(weight_sizes: LocalSizes) -> Refusal | None:
    """Refuse matmuls by the sizes of all ranks: a tensor is gathered in float8 on all ranks or on none."""
    for sizes in weight_sizes:
        if len(sizes) > 1 and any(size % FLOAT8_MULTIPLE or size == 0 for size in sizes):
            held = ", ".join(map(str, sizes))
            return Reason.SIZES_NOT_16, f"the ranks hold {held} of the weight: not all divide by {FLOAT8_MULTIPLE}"
    return None


def _refuse_multiple(matmul: Matmul) -> Refusal | None:
    if indivisible := find_indivisible_size(matmul, dynamic=True):
        return Reason.SIZES_NOT_16, indivisible
    for name, size in (("inner dim", matmul.inner), ("columns", matmul.shape[1])):
        if isinstance(size, int) and size == 0:
            return Reason.SIZES_NOT_16, f"{name} 0: nothing to multiply"
    return None


def _refuse_size(inputs: Sequence[Node], matmul: Matmul, per_row: bool) -> Refusal | None:
    size = find_unknown_size(inputs, _sizes_to_emit(matmul, per_row))
    return None if size is None else (Reason.DYNAMIC_SHAPE, f"size {size} cannot be computed from the graph's inputs")


def _sizes_to_emit(matmul: Matmul, per_row: bool) -> Iterator[Size]:
    """Yield the sizes that the scaled matmul may need: of reshapes, of pieces that are joined, and of per-row scales."""
    yield from sizes_to_emit(shape_of(matmul.node))
    for operand in (matmul.lhs, matmul.rhs):
        if not is_same_shape(operand.shape, shape_of(operand.node)):
            yield from sizes_to_emit(operand.shape)
        node: Node | None = operand.node
        while node is not None:
            if node.target is aten.cat.default:
                yield from sizes_to_emit(shape_of(pieces_of(node)[0]), joined=True)
            if per_row:
                yield from sizes_to_emit(shape_of(node))
            node = element_source(node)
    if per_row:
        yield matmul.shape[0]


def _decision(role: Role, matmul: Matmul, module: str, refusal: Refusal | None, recipe: Recipe) -> CastDecision:
    return CastDecision(
        node=matmul.node.name,
        role=role.value,
        module=module,
        shape=f"{format_shape((matmul.shape[0], matmul.inner))} @ {format_shape((matmul.inner, matmul.shape[1]))}",
        recipe="" if refusal else recipe.name,
        reason=refusal[0] if refusal else None,
        detail=refusal[1] if refusal else "",
    )
