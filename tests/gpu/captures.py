"""Count the CUDA graphs that Inductor captures. A test of CUDA graphs must capture some."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters


def reset() -> None:
    """Reset compiled code, captured graphs and counters."""
    from torch._inductor import cudagraph_trees

    torch._dynamo.reset()
    cudagraph_trees.reset_cudagraph_trees()
    counters.clear()


def count(device: torch.device) -> int:
    """Return the graphs captured since `reset`. AssertionError if there are none, or if Inductor skipped one."""
    from torch._inductor import cudagraph_trees

    skips = counters["inductor"]["cudagraph_skips"]
    manager = cudagraph_trees.get_manager(device.index, create_if_none_exists=False)
    graphs = manager.new_graph_id().id if manager is not None else 0
    if skips or not graphs:
        raise AssertionError(f"{graphs} graphs captured, {skips} skipped")
    return graphs


def step(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return copies of the output and gradients of one step of `run`, the compiled `model`."""
    x = x.requires_grad_()
    y = run(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    found = [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found
