"""Measure torch's attention, forward and backward, without a mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..rank_process import World
from .world import Burst, ProgressLine

POINTS = 2
"""Measurements: forward and backward."""


def measure(world: World, burst: Burst, progress: ProgressLine, quick: bool) -> dict[str, Any]:
    """Return dtype and TFLOP/s as JSON values of profile.AttentionRates, for the slowest rank. Collective."""
    dtype = torch.bfloat16 if world.cuda else torch.float32
    b, h, s, e = (1, 32, 4096 if quick else 8192, 128) if world.cuda else (1, 4, 256, 64)
    operations = 4.0 * b * h * s * s * e  # backward: five matmuls for two
    with torch.enable_grad():
        q, k, v, grad = (torch.randn(b, h, s, e, device=world.device, dtype=dtype) for _ in range(4))
        inputs = [t.requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(q, k, v)
        times = []
        for call in (
            lambda: F.scaled_dot_product_attention(q, k, v),
            lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
        ):
            times.append(burst.us(call, 4, rounds=5))
            progress.step("attention", 1)
    forward, backward = world.worst(times)
    rates = {"forward": operations / forward * 1e-6, "backward": 2.5 * operations / backward * 1e-6}
    return {"dtype": str(dtype).removeprefix("torch."), **rates}
