"""Residuals and norms behind an all_reduce, as models spell them, and look-alikes: the forms of test_fused.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as F

from tests.compiler.rank_compile import world_name

COLS = 16
Form = Callable[..., Any]


def reduced(x: Tensor, w: Tensor) -> Tensor:
    """The output of a row-parallel linear, [B, S, H]."""
    return funcol.all_reduce(x @ w, "sum", world_name())


def hf_rms(hidden: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """transformers' LlamaRMSNorm."""
    dtype = hidden.dtype
    wide = hidden.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(dtype)


def vllm_rms(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """vLLM's RMSNorm.forward_native with a residual, which is added in fp32."""
    wide = x.to(torch.float32) + residual.to(torch.float32)
    residual = wide.to(x.dtype)
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight, residual


def llama(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The residual is read again behind the norm."""
    hidden = residual + reduced(x, w)
    return hf_rms(hidden, weight) @ w.t(), hidden * 2


def vllm(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """In bfloat16 the norm reads a sum that is not rounded."""
    return vllm_rms(reduced(x, w), residual, weight)


def vllm_promoted(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The residual is promoted by the sum, and overwritten."""
    wide = reduced(x, w).to(torch.promote_types(x.dtype, torch.float32)) + residual
    residual.copy_(wide)
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-5)
    return wide.to(x.dtype) * weight, residual * 2


def vllm_last(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Nothing reads the residual behind the last layer."""
    return vllm_rms(reduced(x, w), residual, weight)[0]


def wide_layer(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """LayerNorm of a sum in fp32."""
    wide = reduced(x, w).float() + residual.float()
    var, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    return (((wide - mean) * torch.rsqrt(var + 1e-5)) * weight.float() + bias.float()).to(x.dtype), wide.to(x.dtype)


def wide_sum(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A sum in fp32 that is rounded is the sum in 16 bits."""
    return hf_rms((reduced(x, w).float() + residual.float()).to(x.dtype), weight)


def vllm_kernel(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """vLLM's kernel fused_add_rms_norm: the sum is rounded, and returned as the next residual."""
    hidden = reduced(x, w) + residual
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (wide * weight.float()).to(x.dtype), hidden


def linear_bias(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The bias of a row-parallel linear is added behind the reduction, and rounded in front of the residual."""
    return hf_rms(reduced(x, w) + bias + residual, weight)


def torch_rms(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    hidden = reduced(x, w) + residual
    return F.rms_norm(hidden, (COLS,), weight, 1e-6), hidden


def torch_rms_plain(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return F.rms_norm(reduced(x, w) + residual, (COLS,), eps=1e-4)


def layer(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    hidden = reduced(x, w) + residual
    return F.layer_norm(hidden, (COLS,), weight, bias), hidden


def gemma(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """transformers' GemmaRMSNorm: the weight is added to 1, in fp32."""
    hidden = residual + reduced(x, w)
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + weight.float())).type_as(hidden), hidden


def gemma_sandwich(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Gemma 2: one norm in front of the residual, another one behind it."""
    wide = reduced(x, w).float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    hidden = residual + (wide * (1.0 + weight.float())).type_as(residual)
    return hf_rms(hidden, weight), hidden


def cohere_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    """transformers' CohereLayerNorm."""
    wide = hidden.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (weight.float() * ((wide - mean) * torch.rsqrt(variance + 1e-5))).to(hidden.dtype)


def cohere(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A LayerNorm that is spelled out."""
    hidden = residual + reduced(x, w)
    return cohere_norm(hidden, weight), hidden


def cohere_block(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A parallel block, whose sum begins with the residual."""
    hidden = (residual + reduced(x, w)) + reduced(torch.relu(x), w)
    return cohere_norm(hidden, weight), hidden


def centered_once(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    wide = (reduced(x, w) + residual).float()
    centered = wide - wide.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt((centered * centered).mean(-1, keepdim=True) + 1e-5)
    return (normed * weight.float() + bias.float()).to(x.dtype)


def centered_read(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The centered values are a result."""
    wide = (reduced(x, w) + residual).float()
    centered = wide - wide.mean(-1, keepdim=True)
    return (centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype), centered


def other_mean(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The variance is taken around another mean than that which is subtracted."""
    wide = (reduced(x, w) + residual).float()
    variance = (wide - residual.float().mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
    return ((wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5)).to(x.dtype)


def offset_read(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The weight's sum is a result too."""
    wide = (reduced(x, w) + residual).float()
    total = 1.5 + weight.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * total).to(x.dtype), total


def narrow_offset(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The sum is taken in 16 bits, and so is the weight of the op."""
    wide = (reduced(x, w) + residual).float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight).float()).to(x.dtype)


def post_norm(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The norm stands in front of the residual."""
    return hf_rms(reduced(x, w), weight) + residual


def flattened(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """DTensor reduces a matrix and views it."""
    out = funcol.all_reduce(x.flatten(0, 1) @ w, "sum", world_name())
    hidden = out.view(residual.shape) + residual
    return hf_rms(hidden, weight), hidden


def residual_only(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return (reduced(x, w) + residual).relu()


def alone(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return reduced(x, w).relu()


def in_place(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The residual is an input of the graph, and overwritten."""
    residual += reduced(x, w)
    return hf_rms(residual, weight)


def parallel(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Attention and feed-forward read the same rows (GPT-NeoX, Falcon). One sum has the results of both."""
    hidden = reduced(x, w) + reduced(torch.relu(x), w) + residual
    return hf_rms(hidden, weight), hidden


def averaged(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return funcol.all_reduce(x @ w, "avg", world_name()) + residual


def gathered(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return funcol.all_gather_tensor(x @ w, 0, world_name()) * 2


def scattered(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Sequence parallelism."""
    full = torch.cat([x] * torch.distributed.get_world_size()) @ w
    hidden = funcol.reduce_scatter_tensor(full, "sum", 0, world_name()) + residual
    return hf_rms(hidden, weight), hidden


def vector(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A vector of 16 bytes, of which a rank gets 8."""
    return funcol.reduce_scatter_tensor(residual.flatten()[: 16 // residual.itemsize].clone(), "sum", 0, world_name())


def two_layers(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    hidden = residual
    for _ in range(2):
        hidden = hidden + reduced(hf_rms(hidden, weight) @ w.t(), w)
        hidden = hidden + reduced(torch.relu(hf_rms(hidden, weight) @ w.t()), w)
    return hf_rms(hidden, weight)


def narrow_bias(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The bias is added to the rounded product, so it is not part of the norm."""
    hidden = (reduced(x, w) + residual).float()
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    return normed.to(x.dtype) + bias


def concurrent(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A matmul runs between the collective and its wait."""
    started = torch.ops._c10d_functional.all_reduce(x @ w, "sum", world_name())
    other = torch.relu(x) @ w
    return hf_rms(torch.ops._c10d_functional.wait_tensor(started) + residual, weight), other


# Look-alikes: name -> (function, whether the residual is part of the op, whether the norm is).
def sum_read(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    out = reduced(x, w)
    return out + residual, out * 3


def broadcast(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return reduced(x, w) + bias


def scaled_residual(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return torch.add(reduced(x, w), residual, alpha=2)


def itself(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    out = reduced(x, w)
    return out + out


def other_dim(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    hidden = (reduced(x, w) + residual).float()
    return hidden * torch.rsqrt(hidden.pow(2).mean(0, keepdim=True) + 1e-5)


def wide_read(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The sum in fp32 is a result."""
    wide = reduced(x, w).float() + residual.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype), wide


def wide_residual(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The residual has more bits than the collective."""
    wide = reduced(x, w).float() + residual.float() * 1.1
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype), wide.to(x.dtype)


def cubed(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    hidden = (reduced(x, w) + residual).float()
    return hidden * torch.rsqrt(hidden.pow(3).abs().mean(-1, keepdim=True) + 1e-5)


def other_factor(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The factor is that of another tensor."""
    hidden = (reduced(x, w) + residual).float()
    return hidden * torch.rsqrt(residual.float().pow(2).mean(-1, keepdim=True) + 1e-5)


def factor_read(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A training forward saves the factor for backward."""
    hidden = (reduced(x, w) + residual).float()
    factor = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (hidden * factor).to(residual.dtype), factor


def unbiased(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    hidden = (reduced(x, w) + residual).float()
    var, mean = torch.var_mean(hidden, -1, correction=1, keepdim=True)
    return ((hidden - mean) * torch.rsqrt(var + 1e-5)).to(residual.dtype)


def mean_twice(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """LayerNorm, but the mean is subtracted twice."""
    hidden = (reduced(x, w) + residual).float()
    var, mean = torch.var_mean(hidden, -1, correction=0, keepdim=True)
    return (torch.sub(hidden, mean, alpha=2) * torch.rsqrt(var + 1e-5)).to(residual.dtype)


def offset_twice(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Two sums, each rounded in fp32."""
    wide = (reduced(x, w) + residual).float()
    total = 1e-9 + (1.0 + weight.float())
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * total).to(x.dtype)


def offset_scaled(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The weight is scaled in the sum."""
    wide = (reduced(x, w) + residual).float()
    total = torch.add(torch.ones(COLS), weight.float(), alpha=2)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * total).to(x.dtype)


def view_read(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The view in front of the norm is read again, so it cannot lie within the op."""
    rows = reduced(x, w).view(-1, COLS)
    return F.rms_norm(rows, (COLS,), weight, 1e-6), rows * 2


FORMS: dict[str, tuple[Form, bool, str]] = {
    "llama": (llama, True, "rms"),
    "torch_rms": (torch_rms, True, "rms"),
    "torch_rms_plain": (torch_rms_plain, True, "rms"),
    "layer": (layer, True, "layer"),
    "vllm": (vllm, True, "rms"),
    "vllm_promoted": (vllm_promoted, True, "rms"),
    "vllm_last": (vllm_last, True, "rms"),
    "wide_layer": (wide_layer, True, "layer"),
    "wide_sum": (wide_sum, True, "rms"),
    "wide_read": (wide_read, False, "none"),
    "wide_residual": (wide_residual, False, "none"),
    "in_place": (in_place, True, "rms"),
    "vllm_kernel": (vllm_kernel, True, "rms"),
    "linear_bias": (linear_bias, False, "none"),
    "gemma": (gemma, True, "rms"),
    "gemma_sandwich": (gemma_sandwich, False, "rms"),
    "cohere": (cohere, True, "layer"),
    "centered_once": (centered_once, True, "layer"),
    "centered_read": (centered_read, True, "none"),
    "other_mean": (other_mean, True, "none"),
    "offset_read": (offset_read, True, "rms"),
    "narrow_offset": (narrow_offset, True, "rms"),
    "offset_twice": (offset_twice, True, "none"),
    "offset_scaled": (offset_scaled, True, "none"),
    "post_norm": (post_norm, False, "rms"),
    "flattened": (flattened, True, "rms"),
    "residual_only": (residual_only, True, "none"),
    "alone": (alone, False, "none"),
    "averaged": (averaged, True, "none"),
    "gathered": (gathered, False, "none"),
    "scattered": (scattered, True, "rms"),
    "sum_read": (sum_read, False, "none"),
    "broadcast": (broadcast, False, "none"),
    "scaled_residual": (scaled_residual, False, "none"),
    "itself": (itself, False, "none"),
    "other_dim": (other_dim, True, "none"),
    "cubed": (cubed, True, "none"),
    "other_factor": (other_factor, True, "none"),
    "factor_read": (factor_read, True, "none"),
    "unbiased": (unbiased, True, "none"),
    "narrow_bias": (narrow_bias, True, "rms"),
    "mean_twice": (mean_twice, True, "none"),
    "view_read": (view_read, False, "none"),
    "concurrent": (concurrent, True, "rms"),
}
"""By name: the function, whether the residual is part of the op, and the norm that is."""
