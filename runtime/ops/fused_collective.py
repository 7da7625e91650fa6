"""fused_collective: a collective of few tokens, and what follows a reduction, as one kernel.

Legend: R ranks of the group; T the dtype of the input.

    collective          input           reduced         strategies
    "all_gather"        [s, ...]        [R * s, ...]    "one_shot"
    "reduce_scatter"    [R * s, ...]    [s, ...]        "one_shot"
    "all_reduce"        [...]           [...]           "one_shot", "two_shot"

    summed = reduced + residual                         rounded to T
    normed = norm(summed) * weight + bias               over the last dim, rounded to T; [0] if norm is "none"
    normed = cast(clamp(normed / scale, -F, F))         float8, if there is a scale

An all_gather has no epilogue. Sums are taken in fp32 in rank order and rounded once: results do not depend on the strategy.
norm: "none", "rms" (RMSNorm) or "layer" (LayerNorm), in fp32. `round_before_weight`: the normed rows are rounded to T before
the product with the weight, as transformers does. residual, weight, bias: T, or None. scale: one fp32, or None.

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
    "float epsilon, bool round_before_weight, Tensor? scale, ScalarType normed_dtype, str strategy, str group, str site) "
    "-> (Tensor summed, Tensor normed)"
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
    round_before_weight: bool
    scale: Tensor | None
    normed_dtype: torch.dtype
    strategy: str
    group: str
    site: str


def fake(a: FusedArgs) -> tuple[Tensor, Tensor]:
    """Return empty results of the right sizes."""
    sizes = list(a.input.shape)
    if a.collective == "all_gather":
        sizes[0] = sizes[0] * c10d.group_size(a.group)
    elif a.collective == "reduce_scatter":
        sizes[0] = sizes[0] // c10d.group_size(a.group)
    return a.input.new_empty(sizes), a.input.new_empty(sizes if a.norm != "none" else (0,), dtype=a.normed_dtype)


def fallback(a: FusedArgs) -> tuple[Tensor, Tensor]:
    """Run the collective with c10d, then the epilogue."""
    collectives = {"all_gather": c10d.all_gather, "reduce_scatter": c10d.reduce_scatter, "all_reduce": c10d.all_reduce}
    reduced = collectives[a.collective](a.input, a.group)
    if a.collective != "all_gather":
        reduced = c10d.divide_for_avg(reduced, a.reduce_op, a.group)
    return apply_epilogue(reduced, a)


def apply_epilogue(reduced: Tensor, a: FusedArgs) -> tuple[Tensor, Tensor]:
    """Return the op's results for a reduced tensor."""
    summed = reduced if a.residual is None else reduced + a.residual.reshape(reduced.shape)
    if a.norm == "none":
        return summed, summed.new_empty((0,), dtype=a.normed_dtype)
    wide = torch.promote_types(summed.dtype, torch.float32)
    x = _norm(summed, a, wide)
    if a.scale is None:
        return summed, x
    limit = torch.finfo(a.normed_dtype).max if a.normed_dtype in FLOAT8 else float("inf")
    return summed, (x.to(wide) * a.scale.reciprocal()).clamp(-limit, limit).to(a.normed_dtype)


def _norm(x: Tensor, a: FusedArgs, wide: torch.dtype) -> Tensor:
    """Norm rows by torch's own kernels, which read and write them once, and multiply by the weight in fp32."""
    cols = x.shape[-1:]
    if a.norm == "layer" and not a.round_before_weight:
        return functional.layer_norm(x, cols, a.weight, a.bias, a.epsilon)
    if a.norm == "rms" and a.bias is None and not a.round_before_weight:
        return functional.rms_norm(x, cols, a.weight, a.epsilon)
    dtype = x.dtype if a.round_before_weight else wide
    rows = x.to(dtype)
    norm = functional.layer_norm if a.norm == "layer" else functional.rms_norm
    normed = norm(rows, cols, eps=a.epsilon)
    if a.bias is not None:
        weight = normed.new_ones(cols) if a.weight is None else a.weight.to(dtype)
        return torch.addcmul(a.bias.to(dtype), normed, weight).to(x.dtype)
    return normed.to(x.dtype) if a.weight is None else (normed * a.weight.to(dtype)).to(x.dtype)


DEFINITION = OpDefinition(SCHEMA, FusedArgs, fake, fallback)
