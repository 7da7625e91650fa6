"""Rank functions of test_families.py: a layer of other families of transformers, with few tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.case import device
from tests.models.compare import uncached
from tests.models.hf_load import Logits, load_parallel
from ub_overlap.compiler.reports.history import HISTORY

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "vocab_size": 160, "max_position_embeddings": 64, "initializer_range": 0.1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 32},
    "granite": {"residual_multiplier": 0.22},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 0},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
}


def run(rank: int, world: int, family: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the relative difference of logits from eager's, and (kind, strategy, detail) of the decisions.

    Grouped matmuls have no float64, so eager's float32 is the reference.
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **SIZES, **OTHERS.get(family, {}))
    attention = "eager" if family == "gemma2" else "sdpa"  # its logits are capped
    model = Logits(load_parallel(config, world, torch.float32, attention, vectors=0.3)).to(device()).eval()
    tokens = torch.randint(3, 160, (2, 4), generator=torch.Generator().manual_seed(11)).to(device())
    torch._dynamo.reset()
    mark = HISTORY.mark()
    with torch.no_grad(), uncached():
        plain = model(tokens)
        ours = torch.compile(model, backend="ub_overlap", options=options)(tokens)
    found = [(d.kind.value, str(d.strategy), d.detail) for plan in HISTORY.since(mark) for d in plan.decisions]
    return {"error": float((ours - plain).abs().max() / plain.abs().max()), "decisions": found}


def train_experts(rank: int, world: int) -> dict[str, Any]:
    """Train Qwen 3 MoE with its own plan: a mixture of experts whose grouped matmuls are traced without graph breaks.

    Return the largest difference of gradients from eager's, relative to each one's amax, and the strategies.
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3_moe", **SIZES, **EXPERTS)
    model = Logits(load_parallel(config, world, torch.float32, "sdpa", vectors=0.3)).to(device())
    tokens = torch.randint(3, 160, (2, 16), generator=torch.Generator().manual_seed(11)).to(device())

    def step(call: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        call(tokens).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    torch._dynamo.reset()
    mark = HISTORY.mark()
    truth = step(model)
    with uncached():
        options = {"overlap": "force", "inner": "aot_eager"}
        found = step(torch.compile(model, backend="ub_overlap", options=options, fullgraph=True))
    assert found.keys() == truth.keys()
    errors = [float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in truth.items()]
    return {"error": max(errors), "strategies": [d.strategy for plan in HISTORY.since(mark) for d in plan.decisions]}
