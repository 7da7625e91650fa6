"""Residuals and norms behind an all_reduce, as models spell them, and look-alikes: the forms of test_fused.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as F

from tests.compiler.branch_forms import BRANCHES
from tests.compiler.form_parts import COLS, Parts, hf_rms, reduced, vllm_rms
from tests.compiler.rank_compile import world_name


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


def parallel_biases(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The same with a bias behind each reduction (Phi)."""
    hidden = (reduced(x, w) + bias) + (reduced(torch.relu(x), w) + weight) + residual
    return F.layer_norm(hidden, (COLS,), weight, bias), hidden


def two_vectors(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A vector is reduced, so the vector that is added is its residual."""
    hidden = reduced(x[0, 0], w) + residual[0, 0]
    return hf_rms(hidden, weight), hidden


def two_post_norms(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Each of two collectives has a norm; one of them has the sums too."""
    return hf_rms(reduced(x, w), weight) + hf_rms(reduced(torch.relu(x), w), weight) + residual


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


FORMS: dict[str, Parts] = {
    **BRANCHES,
    "llama": Parts(llama, True, "rms"),
    "torch_rms": Parts(torch_rms, True, "rms"),
    "torch_rms_plain": Parts(torch_rms_plain, True, "rms"),
    "layer": Parts(layer, True, "layer"),
    "vllm": Parts(vllm, True, "rms"),
    "vllm_promoted": Parts(vllm_promoted, True, "rms"),
    "vllm_last": Parts(vllm_last, True, "rms"),
    "wide_layer": Parts(wide_layer, True, "layer"),
    "wide_sum": Parts(wide_sum, True, "rms"),
    "wide_read": Parts(wide_read, False, "none"),
    "wide_residual": Parts(wide_residual, False, "none"),
    "in_place": Parts(in_place, True, "rms"),
    "vllm_kernel": Parts(vllm_kernel, True, "rms"),
    "gemma": Parts(gemma, True, "rms"),
    "cohere": Parts(cohere, True, "layer"),
    "centered_once": Parts(centered_once, True, "layer"),
    "centered_read": Parts(centered_read, True, "none"),
    "other_mean": Parts(other_mean, True, "none"),
    "offset_read": Parts(offset_read, True, "rms"),
    "narrow_offset": Parts(narrow_offset, True, "rms"),
    "offset_twice": Parts(offset_twice, True, "none"),
    "offset_scaled": Parts(offset_scaled, True, "none"),
    "two_vectors": Parts(two_vectors, True, "rms"),
    "flattened": Parts(flattened, True, "rms"),
    "residual_only": Parts(residual_only, True, "none"),
    "alone": Parts(alone, False, "none"),
    "averaged": Parts(averaged, True, "none"),
    "gathered": Parts(gathered, False, "none"),
    "scattered": Parts(scattered, True, "rms"),
    "sum_read": Parts(sum_read, False, "none"),
    "broadcast": Parts(broadcast, False, "none"),
    "scaled_residual": Parts(scaled_residual, False, "none"),
    "itself": Parts(itself, False, "none"),
    "other_dim": Parts(other_dim, True, "none"),
    "cubed": Parts(cubed, True, "none"),
    "other_factor": Parts(other_factor, True, "none"),
    "factor_read": Parts(factor_read, True, "none"),
    "unbiased": Parts(unbiased, True, "none"),
    "narrow_bias": Parts(narrow_bias, True, "rms"),
    "mean_twice": Parts(mean_twice, True, "none"),
    "view_read": Parts(view_read, False, "none"),
    "concurrent": Parts(concurrent, True, "rms"),
}
