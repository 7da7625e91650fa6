"""What Inductor captures: a row that claims CUDA graphs counts them."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters


def fresh() -> None:
    """Nothing compiled, nothing captured, nothing counted."""
    from torch._inductor import cudagraph_trees

    torch._dynamo.reset()
    cudagraph_trees.reset_cudagraph_trees()
    counters.clear()


def count(device: torch.device) -> int:
    """Graphs captured since `fresh`; AssertionError where there is none, or where Inductor skipped one."""
    from torch._inductor import cudagraph_trees

    skips = counters["inductor"]["cudagraph_skips"]
    manager = cudagraph_trees.get_manager(device.index, create_if_none_exists=False)
    graphs = manager.new_graph_id().id if manager is not None else 0
    if skips or not graphs:
        raise AssertionError(f"{graphs} graphs captured, {skips} skipped")
    return graphs
