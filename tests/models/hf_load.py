"""Causal models of transformers with random weights, parallelised by their own tensor-parallel plan. Nothing is downloaded."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Logits(nn.Module):
    """Causal model without its cache. Tokens [B, S] -> logits [B, S, V]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def load_parallel(config: Any, world: int, dtype: torch.dtype, attention: str = "sdpa", vectors: float = 0.0) -> Any:
    """Load the causal model of `config` with `tp_plan="auto"` over all ranks of the existing process group.

    `vectors`: the spread that is added to its vectors: the biases are 0 and the weights of norms 1 otherwise.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    folder = [""]
    with tempfile.TemporaryDirectory(prefix="hf-load-") as mine:
        if dist.get_rank() == 0:
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
            with torch.no_grad():
                for p in model.parameters() if vectors else ():
                    if p.dim() == 1:
                        p.add_(vectors * torch.randn_like(p))
            model.to(dtype).save_pretrained(mine)
            folder = [mine]
        dist.broadcast_object_list(folder, src=0)
        previous = {key: os.environ.get(key) for key in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
        rank = dist.get_rank()
        local = rank % max(1, torch.cuda.device_count())  # ranks may share a GPU
        os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(local))
        try:
            plan = DistributedConfig(tp_size=world, tp_plan="auto")
            model = AutoModelForCausalLM.from_pretrained(
                folder[0], distributed_config=plan, dtype=dtype, attn_implementation=attention
            )
        finally:
            for key, value in previous.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
        dist.barrier()
    return model
