"""Programs of test_in_flight_inputs.py: torchtitan's form, fully_shard x tensor parallelism around compiled blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.harness.later_steps import compiled_before
from tests.models.compare import uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.reports.history import HISTORY

TENSOR_PARALLEL = 2
STEPS = 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(64), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """[B, S] of tokens -> [B, S / tensor parallel, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(32, 64), nn.ModuleList(Block() for _ in range(2))
        self.types: set[type] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        self.types |= {type(x), type(getattr(x, "_local_tensor", x))}
        for block in self.blocks:
            x = block(x)
        return x.to_local() if isinstance(x, DTensor) else x


def sharded_model(world: int, inner: str | None, local: bool) -> Model:
    """Return a model whose embedding and blocks exchange tensors, or with local=False DTensors. inner None: not compiled."""
    meshes = init_device_mesh("cpu", (world // TENSOR_PARALLEL, TENSOR_PARALLEL), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Model()
    tp, rows = meshes["tp"], Shard(1)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows, use_local_output=local)
    parallelize_module(model, tp, {"embedding": embedding})
    for block in model.blocks:
        gathered = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
        down = RowwiseParallel(output_layouts=rows, use_local_output=local)
        norm = SequenceParallel(use_local_output=False)
        plan = {"norm": norm, "mlp": gathered, "mlp.up": ColwiseParallel(), "mlp.down": down}
        parallelize_module(block, tp, plan)
        if inner is not None:
            block.compile(backend="ub_overlap", fullgraph=True, options={"overlap": "force", "inner": inner})
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=meshes["dp"])
    return model


def gradients(rank: int, world: int, inner: str, local: bool) -> tuple[float, float, bool, list[str]]:
    """Return the largest difference from eager of the gradients of all steps, the norm of the embedding's, whether it was in
    flight, and the strategies."""
    results: list[list[Tensor]] = []
    mark = HISTORY.mark()
    for which in (None, inner):
        model = sharded_model(world, which, local)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[Tensor] = []
        with uncached():
            for step in range(STEPS):
                tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
                with compiled_before(step):
                    model(tokens).square().mean().backward()
                found += [p.grad.to_local().clone() for p in model.parameters()]  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
        results.append(found)
    eager, ours = results
    strategies = [d.strategy.mode.value for p in HISTORY.since(mark) for d in p.decisions]
    worst = max(float((a - b).abs().max()) for a, b in zip(ours, eager, strict=True))
    return worst, float(ours[0].norm()), compat.InFlightTensor in model.types, strategies
