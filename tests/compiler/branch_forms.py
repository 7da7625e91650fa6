"""Branches in front of the residual, as models spell them, and look-alikes: forms of test_fused.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as F

from tests.compiler.form_parts import COLS, Parts, hf_rms, reduced, vllm_rms
from tests.compiler.rank_compile import world_name


def linear_bias(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The bias of a row-parallel linear is added behind the reduction, and rounded in front of the residual."""
    return hf_rms(reduced(x, w) + bias + residual, weight)


def gemma_sandwich(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Gemma 2: one norm in front of the residual, another one behind it."""
    wide = reduced(x, w).float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    hidden = residual + (wide * (1.0 + weight.float())).type_as(residual)
    return hf_rms(hidden, weight), hidden


def gemma_vllm(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """vLLM's Gemma 2: a norm of the branch, and a norm of the sum in fp32."""
    return vllm_rms(hf_rms(reduced(x, w), weight), residual, weight)


def granite(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The branch is multiplied by a constant."""
    hidden = residual + reduced(x, w) * 0.22
    return hf_rms(hidden, weight), hidden


def halved(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The branch is divided by a power of two."""
    return reduced(x, w) / 2 + residual


def negated(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The branch is subtracted."""
    return -reduced(x, w) + residual


def a_third(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The branch is divided by a number whose inverse rounds."""
    return reduced(x, w) / 3 + residual


def all_of_branch(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Every step of a branch, with views between."""
    out = (funcol.all_reduce(x.flatten(0, 1) @ w, "sum", world_name()) + bias).view(residual.shape)
    out = F.layer_norm(out, (COLS,), weight, bias, 1e-3).flatten(0, 1) * 0.5
    hidden = out.view(residual.shape) + residual
    return F.layer_norm(hidden, (COLS,), bias, weight), hidden


def branch_read(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The branch is a result too."""
    out = reduced(x, w) + bias
    return out + residual, out * 3


def bias_twice(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Two vectors are added in front of the residual."""
    return reduced(x, w) + bias + weight + residual


def late_bias(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The vector is added behind the norm, in 16 bits."""
    return hf_rms(reduced(x, w), weight) + bias + residual


def norm_per_head(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The norm is over a part of the columns."""
    heads = F.rms_norm(reduced(x, w).unflatten(-1, (2, COLS // 2)), (COLS // 2,), weight[: COLS // 2], 1e-5)
    return heads.flatten(-2) + residual


def wide_factor(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The product is not rounded to 16 bits."""
    return (reduced(x, w).float() * 0.3).to(x.dtype) + residual


def tensor_factor(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The factor is a vector (LayerScale)."""
    return reduced(x, w) * weight + residual


def post_norm(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The norm stands in front of the residual, and none behind it."""
    return hf_rms(reduced(x, w), weight) + residual


def shared_expert(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The gated result of a shared expert, which every rank has, is added in front of the residual (Qwen 2 MoE)."""
    out = funcol.all_reduce(x.flatten(0, 1) @ w, "sum", world_name())
    shared = torch.sigmoid(residual) * weight
    hidden = residual + (out + shared.flatten(0, 1)).view(residual.shape)
    return hf_rms(hidden, weight), hidden


def shared_read(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The first sum is a result too."""
    first = reduced(x, w) + torch.sigmoid(residual)
    return hf_rms(first + residual, weight), first


def shared_wider(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The second sum is in fp32."""
    return (reduced(x, w) + torch.sigmoid(residual)).float() + residual.float()


BRANCHES: dict[str, Parts] = {
    "linear_bias": Parts(linear_bias, True, "rms", ("the linear bias",)),
    "gemma_sandwich": Parts(gemma_sandwich, True, "rms", ("rms",)),
    "gemma_vllm": Parts(gemma_vllm, True, "rms", ("rms",)),
    "granite": Parts(granite, True, "rms", ("the factor 0.22",)),
    "halved": Parts(halved, True, "none", ("the factor 0.5",)),
    "negated": Parts(negated, True, "none", ("the factor -1",)),
    "a_third": Parts(a_third, False, "none"),
    "all_of_branch": Parts(all_of_branch, True, "layer", ("the linear bias", "layer", "the factor 0.5")),
    "branch_read": Parts(branch_read, False, "none"),
    "bias_twice": Parts(bias_twice, False, "none"),
    "late_bias": Parts(late_bias, False, "rms"),
    "norm_per_head": Parts(norm_per_head, False, "none"),
    "wide_factor": Parts(wide_factor, False, "none"),
    "tensor_factor": Parts(tensor_factor, False, "none"),
    "post_norm": Parts(post_norm, True, "none", ("rms",)),
    "shared_expert": Parts(shared_expert, True, "rms", ("the addend",)),
    "shared_read": Parts(shared_read, True, "none"),
    "shared_wider": Parts(shared_wider, True, "none"),
}
