"""transformers' Llama, loaded by its from_pretrained and parallelised by its own tensor-parallel plan.

The checkpoint is random, generated here from a tiny LlamaConfig; nothing is downloaded. torch.compile gets the whole causal
model. Requires the packages of tests/models/requirements.txt.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.models.case import Case, Expected, Sites, device
from tests.models.hf_load import Logits, load_parallel


def load(world: int, layers: int, kv_heads: int, dtype: torch.dtype, bias: bool) -> Any:
    """Load a tiny LlamaForCausalLM with `tp_plan="auto"` over all ranks of the existing process group."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        vocab_size=160,
        max_position_embeddings=64,
        attention_bias=bias,
        mlp_bias=bias,
        attn_implementation="sdpa",
        initializer_range=0.1,
    )
    return load_parallel(config, world, dtype)


def build(
    rank: int,
    world: int,
    layers: int = 1,
    batch: int = 2,
    kv_heads: int = 8,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    dynamic: bool | None = None,
) -> Case:
    """Build the model with all_reduce tensor parallelism: o_proj and down_proj reduce in the forward.

    Backward: one all_reduce per column-wise linear: q k v (merge into one), gate up (merge into one), and the head's. The
    head's logits are gathered after its matmul, and the vocabulary-parallel embedding is summed without a matmul. In the first
    layer the input of q k v comes from the embedding, which also has a gradient.
    """
    model = load(world, layers, kv_heads, dtype, bias)
    if exact:
        model = model.to(torch.float64)
    model.to(device()).train()
    tokens = torch.randint(160, (batch, 16), generator=torch.Generator().manual_seed(11)).to(device())
    expected = Expected(
        Sites(reduce=2 * layers, plain_gather=1, plain_reduce=1), Sites(reduce=2 * layers + 1, merged=3 * layers)
    )
    return Case(Logits(model), (tokens,), expected, dynamic=dynamic)
