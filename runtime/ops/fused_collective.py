"""fused_collective: a collective of few tokens, and what follows a reduction, as one kernel.

Legend: R ranks of the group; T the dtype of the input; F the largest value of a float8 format.

    collective          input           reduced         strategies
    "all_gather"        [s, ...]        [R * s, ...]    "one_shot"
    "reduce_scatter"    [R * s, ...]    [s, ...]        "one_shot"
    "all_reduce"        [...]           [...]           "one_shot", "two_shot"

    summed     = reduced + residual                           rounded to T
    normed     = norm(summed) * (offset + weight) + bias      over the last dim, rounded to T; [0] if norm is "none"
    row_scales = max(amax(|row|) * amax_factor, least_scale)  [..., 1], if amax_factor is above 0; else [0]
    normed     = cast(clamp(normed / scale, -F, F))           float8, if there is a scale, or one for each row

An all_gather has no epilogue. Sums are taken in fp32 in rank order and rounded once: results do not depend on the strategy.
norm: "none", "rms" (RMSNorm) or "layer" (LayerNorm), in fp32. Without `round_sum` it reads the sum with the residual in fp32,
as vLLM's RMSNorm.forward_native does. `round_before_weight`: the normed rows are rounded to T before the product with the
weight, as transformers does. `weight_offset`: added to the weight in fp32; 1 for Gemma. residual, weight, bias: T, or None.
scale: one fp32, or None. `divide_by_scale`: rows are divided by their scale, not multiplied by its reciprocal.

A row of a norm has a multiple of 16 bytes, and at most 65536. Without a norm, the result of a rank has a multiple of 16 bytes.
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
    "fused_collective(Tensor input, str collective, str reduce_op, Tensor? residual, str norm, Tensor? weight, Tensor? bias, "
    "float epsilon, bool round_sum, bool round_before_weight, float weight_offset, Tensor? scale, float amax_factor, "
    "float least_scale, bool divide_by_scale, ScalarType normed_dtype, str strategy, str group, str site) "
    "-> (Tensor summed, Tensor normed, Tensor row_scales)"
)


class FusedArgs(NamedTuple):
    input: Tensor
    collective: str
    reduce_op: str
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
    residual = None if a.residual is None else a.residual.reshape(reduced.shape)
    summed = reduced if residual is None else reduced + residual
    none = summed.new_empty((0,), dtype=wide)
    if a.norm == "none":
        return summed, summed.new_empty((0,), dtype=a.normed_dtype), none
    x = _norm(summed if residual is None or a.round_sum else reduced.to(wide) + residual, a, summed.dtype)
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


def _norm(x: Tensor, a: FusedArgs, dtype: torch.dtype) -> Tensor:
    """Norm rows of `dtype` or wider by torch's own kernels, which read and write them once. Multiply by the weight in fp32.

    The result has `dtype`.
    """
    cols = x.shape[-1:]
    if x.dtype == dtype and not a.round_before_weight and not a.weight_offset:
        if a.norm == "layer":
            return functional.layer_norm(x, cols, a.weight, a.bias, a.epsilon)
        if a.bias is None:
            return functional.rms_norm(x, cols, a.weight, a.epsilon)
    if not a.round_before_weight:
        x = x.to(torch.promote_types(dtype, torch.float32))
    norm = functional.layer_norm if a.norm == "layer" else functional.rms_norm
    normed = norm(x, cols, eps=a.epsilon)
    if a.round_before_weight:
        normed = normed.to(dtype)
    weight = None if a.weight is None else _weight(a, normed)
    if a.bias is not None:
        return torch.addcmul(a.bias.to(normed.dtype), normed, normed.new_ones(cols) if weight is None else weight).to(dtype)
    return normed.to(dtype) if weight is None else (normed * weight).to(dtype)


def _weight(a: FusedArgs, normed: Tensor) -> Tensor:
    """Return the weight with its offset, in the type of the normed rows or in fp32."""
    assert a.weight is not None
    if not a.weight_offset:
        return a.weight.to(normed.dtype)
    return a.weight_offset + a.weight.to(torch.promote_types(a.weight.dtype, torch.float32))


DEFINITION = OpDefinition(SCHEMA, FusedArgs, fake, fallback)
