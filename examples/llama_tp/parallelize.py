"""Tensor and sequence parallelism for `model.Transformer` with DTensor.

Between the blocks each rank has a shard of the positions, x [B, S/R, D] (Shard(1)). A block's projections need all positions of
x: an all_gather before wq wk wv (and w1 w3). Its last matmul computes a partial sum: a reduce_scatter after wo (and w2). The
backend hides these four collectives of a block.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from model import ModelArgs, Transformer, TransformerBlock


def check_divides(args: ModelArgs, ranks: int) -> None:
    """Raise ValueError unless heads and hidden channels divide by `ranks`."""
    for name in ("num_heads", "num_kv_heads", "hidden_dim"):
        if getattr(args, name) % ranks:
            raise ValueError(f"{name}={getattr(args, name)} must divide by the number of ranks, {ranks}")


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Distribute `model` in place over the 1D `mesh`; tokens [B, S] and logits [B, S, V] stay whole on every rank.

    Raises:
        ValueError: heads or hidden channels do not divide by the mesh's size.
    """
    check_divides(model.args, mesh.size())
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.layers:
        assert isinstance(block, TransformerBlock)
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model
