"""Models that already use FP8: torchao's float8 training under DTensor tensor parallelism.

Legend: B batch, S sequence (S/R per rank), D width, F feed-forward width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from tests.models.case import Case, Expected, Sites, noise, settle
from tests.models.dtensor_llama import tensor_mesh


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x). [B, S, D] -> [B, S, D]."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


class Wrapped(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.mlp = FeedForward(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def build(
    rank: int,
    world: int,
    recipe: str = "tensorwise",
    gather_fp8: bool = True,
    batch: int = 2,
    along: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    exact: bool = False,
    hidden: int = 96,
) -> Case:
    """Build the model.

    `recipe`: a Float8LinearConfig recipe name. `gather_fp8`: torchao's own FP8 all-gather (only the tensorwise recipe has it).
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

    mesh = tensor_mesh(world, False)
    torch.manual_seed(7)
    module = settle(Wrapped(64, hidden), dtype, exact)
    if not exact:
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(module, config=config)
    plain = exact or not gather_fp8
    col, row = (ColwiseParallel, RowwiseParallel) if plain else (Float8ColwiseParallel, Float8RowwiseParallel)
    prepare = PrepareModuleInput if plain else PrepareFloat8ModuleInput
    from torch.distributed.tensor import Replicate

    parallelize_module(
        module.mlp,
        mesh,
        {"w1": col(), "w3": col(), "w2": row(output_layouts=Shard(along))},
    )
    parallelize_module(module, mesh, {"mlp": prepare(input_layouts=(Shard(along),), desired_input_layouts=(Replicate(),))})
    shape = [batch, 32, 64]
    shape[along] //= world
    x = noise(tuple(shape), 11 + rank, dtype, exact)
    expected = Expected(Sites(gather=1, scatter=1), Sites(gather=1, scatter=1, contracted=1))
    return Case(module, (x,), expected)
