"""fused_collective: a collective of few tokens, and what follows a reduction, as one kernel.

Legend: R ranks of the group; T the dtype of the input; F the largest value of a float8 format.

    collective          input           reduced         strategies
    "all_gather"        [s, ...]        [R * s, ...]    "one_shot"
    "reduce_scatter"    [R * s, ...]    [s, ...]        "one_shot"
    "all_reduce"        [...]           [...]           "one_shot", "two_shot"

    branch     = branch_norm(reduced + linear_bias) * branch_factor + addend
    summed     = branch + residual
    normed     = norm(summed)                                 [0] if norm is "none"
    row_scales = max(amax(|row|) * amax_factor, least_scale)  [..., 1], if amax_factor is above 0; else [0]
    normed     = cast(clamp(normed / scale, -F, F))           float8, if there is a scale, or one for each row

An all_gather has no epilogue. Sums are taken in fp32 in rank order and rounded once: results do not depend on the strategy.
Each step of the epilogue is computed in fp32 and rounded to T. addend, residual, linear_bias, weights, biases: T, or None.

Both norms are over the last dim: norm(x) * (weight_offset + weight) + bias. Kinds are "none", "rms" (RMSNorm) and "layer"
(LayerNorm). `round_before_weight`: the normed rows are rounded to T before the product with the weight, as transformers does.
`weight_offset`: added to the weight in fp32; 1 for Gemma. Without `round_sum` the norm reads the sum with the residual in fp32,
as vLLM's RMSNorm.forward_native does.

scale: one fp32, or None. `divide_by_scale`: rows are divided by their scale, not multiplied by its reciprocal.

With a norm or a branch, a row has a multiple of 16 bytes, and at most 65536. Otherwise the result of a rank has a multiple of
16 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..fp8.numerics import FLOAT8
from . import c10d_fallback as c10d
from .definition import OpDefinition

SCHEMA = (
    "fused_collective(Tensor input, str collective, str reduce_op, "
    "Tensor? linear_bias, str branch_norm, Tensor? branch_weight, Tensor? branch_bias, float branch_epsilon, "
    "bool branch_round_before_weight, float branch_weight_offset, float branch_factor, Tensor? addend, "
    "Tensor? residual, str norm, Tensor? weight, Tensor? bias, float epsilon, "
    "bool round_sum, bool round_before_weight, float weight_offset, "
    "Tensor? scale, float amax_factor, float least_scale, bool divide_by_scale, ScalarType normed_dtype, "
    "str strategy, str group, str site) -> (Tensor summed, Tensor normed, Tensor row_scales)"
)

NO_BRANCH = (None, "none", None, None, 0.0, False, 0.0, 1.0, None)
"""Arguments from `linear_bias` to `addend` with which the branch is the reduced tensor."""


class RowNorm(NamedTuple):
    """A norm of rows, as the op has two."""

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    epsilon: float
    round_before_weight: bool
    weight_offset: float


class FusedArgs(NamedTuple):
    input: Tensor
    collective: str
    reduce_op: str
    linear_bias: Tensor | None
    branch_norm: str
    branch_weight: Tensor | None
    branch_bias: Tensor | None
    branch_epsilon: float
    branch_round_before_weight: bool
    branch_weight_offset: float
    branch_factor: float
    addend: Tensor | None
    residual: Tensor | None
    norm: str
    weight: Tensor | None
    bias: Tensor | None
    epsilon: float
    round_sum: bool
    round_before_weight: bool
    weight_offset: float
    scale: Tensor | None
    amax_factor: float
    least_scale: float
    divide_by_scale: bool
    normed_dtype: torch.dtype
    strategy: str
    group: str
    site: str

    @property
    def scales_rows(self) -> bool:
        """Whether each row has a scale, computed from its amax."""
        return self.amax_factor > 0


def fake(a: FusedArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty results of the right sizes."""
    sizes = list(a.input.shape)
    if a.collective == "all_gather":
        sizes[0] = sizes[0] * c10d.group_size(a.group)
    elif a.collective == "reduce_scatter":
        sizes[0] = sizes[0] // c10d.group_size(a.group)
    normed = a.input.new_empty(sizes if a.norm != "none" else (0,), dtype=a.normed_dtype)
    wide = torch.promote_types(a.input.dtype, torch.float32)
    return a.input.new_empty(sizes), normed, a.input.new_empty((*sizes[:-1], 1) if a.scales_rows else (0,), dtype=wide)


def fallback(a: FusedArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Run the collective with c10d, then the epilogue."""
    collectives = {"all_gather": c10d.all_gather, "reduce_scatter": c10d.reduce_scatter, "all_reduce": c10d.all_reduce}
    reduced = collectives[a.collective](a.input, a.group)
    if a.collective != "all_gather":
        reduced = c10d.divide_for_avg(reduced, a.reduce_op, a.group)
    return apply_epilogue(reduced, a)


def apply_epilogue(reduced: Tensor, a: FusedArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the op's results for a reduced tensor."""
    wide = torch.promote_types(reduced.dtype, torch.float32)
    branch = _branch(reduced, a)
    residual = None if a.residual is None else a.residual.reshape(reduced.shape)
    summed = branch if residual is None else branch + residual
    none = summed.new_empty((0,), dtype=wide)
    if a.norm == "none":
        return summed, summed.new_empty((0,), dtype=a.normed_dtype), none
    x = summed if residual is None or a.round_sum else branch.to(wide) + residual
    norm = RowNorm(a.norm, a.weight, a.bias, a.epsilon, a.round_before_weight, a.weight_offset)
    x = _apply_norm(x, norm, summed.dtype)
    if a.scale is None and not a.scales_rows:
        return summed, x, none
    limit = torch.finfo(a.normed_dtype).max if a.normed_dtype in FLOAT8 else float("inf")
    x = x.to(wide)
    if a.scale is None:
        scale = (x.abs().amax(-1, keepdim=True) * a.amax_factor).clamp_min(a.least_scale)
    else:
        scale = a.scale.reshape(())
    scaled = x / scale if a.divide_by_scale else x * scale.reciprocal()
    return summed, scaled.clamp(-limit, limit).to(a.normed_dtype), scale if a.scales_rows else none


def _branch(reduced: Tensor, a: FusedArgs) -> Tensor:
    """Return what is added to the residual."""
    branch = reduced if a.linear_bias is None else reduced + a.linear_bias
    if a.branch_norm != "none":
        norm = RowNorm(
            a.branch_norm,
            a.branch_weight,
            a.branch_bias,
            a.branch_epsilon,
            a.branch_round_before_weight,
            a.branch_weight_offset,
        )
        branch = _apply_norm(branch, norm, branch.dtype)
    branch = branch if a.branch_factor == 1 else branch * a.branch_factor
    return branch if a.addend is None else branch + a.addend.reshape(reduced.shape)


def _apply_norm(x: Tensor, norm: RowNorm, dtype: torch.dtype) -> Tensor:
    """Norm rows of `dtype` or wider by torch's own kernels, which read and write them once. Multiply by the weight in fp32.

    The result has `dtype`.
    """
    cols = x.shape[-1:]
    if x.dtype == dtype and not norm.round_before_weight and not norm.weight_offset:
        if norm.kind == "layer":
            return functional.layer_norm(x, cols, norm.weight, norm.bias, norm.epsilon)
        if norm.bias is None:
            return functional.rms_norm(x, cols, norm.weight, norm.epsilon)
    if not norm.round_before_weight:
        x = x.to(torch.promote_types(dtype, torch.float32))
    normed = (functional.layer_norm if norm.kind == "layer" else functional.rms_norm)(x, cols, eps=norm.epsilon)
    if norm.round_before_weight:
        normed = normed.to(dtype)
    weight = None if norm.weight is None else _weight(norm, norm.weight, normed)
    if norm.bias is not None:
        return torch.addcmul(norm.bias.to(normed.dtype), normed, normed.new_ones(cols) if weight is None else weight).to(dtype)
    return normed.to(dtype) if weight is None else (normed * weight).to(dtype)


def _weight(norm: RowNorm, weight: Tensor, normed: Tensor) -> Tensor:
    """Return the weight with its offset, in the type of the normed rows or in fp32."""
    if not norm.weight_offset:
        return weight.to(normed.dtype)
    return norm.weight_offset + weight.to(torch.promote_types(weight.dtype, torch.float32))


DEFINITION = OpDefinition(SCHEMA, FusedArgs, fake, fallback)
