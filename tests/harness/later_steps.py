"""Steps of a training loop after which nothing may be compiled."""

from __future__ import annotations

import torch

STEPS_THAT_COMPILE = 2
"""The first step compiles; the second may for what the first left behind, as gradients and states of optimizers."""


def compiled_before(step: int) -> torch.compiler.set_stance:
    """Return a context for a step, counted from 0: from the third on, a compilation is an error."""
    return torch.compiler.set_stance("fail_on_recompile" if step >= STEPS_THAT_COMPILE else "default")
