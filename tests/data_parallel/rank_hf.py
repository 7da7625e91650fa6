"""transformers' Llama under fully_shard with our collectives, each layer compiled: training equals one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

import ub_overlap
from tests.harness.later_steps import compiled_before

STEPS, MICRO, BATCH, CLIP = 3, 2, 2, 0.5


def whole_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 160}
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, num_hidden_layers=2, max_position_embeddings=32, initializer_range=0.1, attn_implementation="sdpa"
    )
    return LlamaForCausalLM(config).train()


def train(model: Any, replicas: range, world: int) -> list[float]:
    """Return the losses of steps of `MICRO` batches with clipped gradients. `replicas`: whose share of a batch it computes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(STEPS):
        for part in range(MICRO):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part == MICRO - 1)
            generator = torch.Generator().manual_seed(part)
            tokens = torch.randint(160, (world * BATCH, 16), generator=generator)
            own = torch.cat([tokens.chunk(world)[r] for r in replicas])
            with compiled_before(step):
                loss = model(input_ids=own, labels=own, use_cache=False).loss / MICRO
                loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trains_as_one_process(
    rank: int, world: int, folder: str, way: str
) -> tuple[list[float], list[float], float, dict[str, str]]:
    """Return own losses, those of one process, the largest difference of weights read from a checkpoint, and transports.

    `way`: "by name", or "enabled", where the program names nothing of ours.
    """
    own: dict[str, Any] = {"inner": "aot_eager"}
    if way == "enabled":
        ub_overlap.enable(own, fsdp=True)
    model = whole_model()
    for layer in model.model.layers:
        fully_shard(layer)
        layer.compile(**({} if way == "enabled" else {"backend": "ub_overlap", "options": own}))
    fully_shard(model)
    if way == "by name":
        ub_overlap.fsdp.install(model)
    losses = train(model, range(rank, rank + 1), world)
    calls = {site: one.transport for site, one in ub_overlap.site_stats().items() if site.startswith("/fsdp.model.layers")}
    ub_overlap.disable()
    plain = whole_model()
    expected = train(plain, range(world), world)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    read = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    dcp.load(read, checkpoint_id=folder)
    worst = max(float((read[name] - value).abs().max()) for name, value in plain.state_dict().items())
    return losses, expected, worst, calls
