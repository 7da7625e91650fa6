"""What the forms of fused_forms.py and branch_forms.py share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

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


@dataclass(frozen=True)
class Parts:
    """A form, and what of it is part of the op: the residual, the norm, and steps of the branch."""

    form: Form
    residual: bool
    norm: str
    branch: tuple[str, ...] = ()
