"""Helpers that run on the ranks: context parallelism in one graph with weights that are gathered where they are used.

Replicas have sequences of their own. The ranks of one share its sequences. Weights are sharded over the ranks of all replicas.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as cp
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from tests.context_parallel.model import Attention
from tests.context_parallel.rank_attention import BATCH, WIDTH, difference, train
from tests.models.compare import uncached
from tests.models.sharded_llama import EXAMPLES
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.tools.planner.ring_attention import ring_attention

POSITIONS, LAYERS = 64, 2
NORMS, MATRICES = 2, 6
"""Weights of a layer."""


class Block(nn.Module):
    """An attention and a feed-forward, each behind a norm and added to its input. [B, S, D] -> the same."""

    def __init__(self, width: int, form: str, causal: bool, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, 4, form, causal, mesh)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def blocks(layers: int, form: str, causal: bool, mesh: DeviceMesh | None = None) -> nn.Sequential:
    """Return the model with whole weights, which are equal on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(*(Block(WIDTH, form, causal, mesh) for _ in range(layers)))


def shard_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard all weights as examples/fsdp_tp does."""
    if str(EXAMPLES / "fsdp_tp") not in sys.path:
        sys.path.append(str(EXAMPLES / "fsdp_tp"))
    from in_graph_shards import shard_parameters

    shard_parameters(model, mesh)


def compare_with_sharded_weights(
    rank: int,
    world: int,
    form: str,
    options: dict[str, Any],
    rotation: str = "",
    load_balance: bool = True,
    replicas: int = 1,
    layers: int = LAYERS,
    positions: int = POSITIONS,
) -> tuple[float, float, list[Plan]]:
    """Return the largest differences from training on whole sequences in fp64 and from the program as it is, and the plans.

    `rotation`: of torch's ring attention, with which `form` is "ring". `positions`: of a rank.
    """
    shared, causal = world // replicas, form in ("ring", "ulysses")
    mesh = init_device_mesh("cpu", (replicas, shared), mesh_dim_names=("dp", "cp"))
    whole, model = blocks(layers, "whole", causal).double(), blocks(layers, form, causal, mesh)
    shard_weights(model, mesh._flatten("dp_cp"))
    sequences = torch.randn(replicas * BATCH, positions * shared, WIDTH, generator=torch.Generator().manual_seed(5))
    expected = train(whole, whole, sequences.double())
    mark = HISTORY.mark()
    with uncached(), ring_attention(rotation, load_balance) if rotation else contextlib.nullcontext():
        balancer = _HeadTailLoadBalancer(positions * shared, shared, "cpu") if rotation and load_balance else None
        batch = [t.chunk(replicas)[mesh.get_local_rank("dp")] for t in (sequences, *expected[:2])]
        parts = cp._context_parallel_shard(mesh["cp"], batch, [1] * 3, balancer)
        x, y, gradient = (t.contiguous() for t in parts if isinstance(t, Tensor))
        plain = train(model, model, x)
        model.zero_grad(set_to_none=True)
        found = train(torch.compile(model, backend="ub_overlap", options=options, fullgraph=True), model, x)
    # Gradients are averaged over all ranks, those of the whole sequences are summed.
    own = [*found[:2], *(_as_dtensor(g).full_tensor() * world for g in found[2:])]
    from_whole = [difference(a, b) for a, b in zip(own, [y, gradient, *expected[2:]], strict=True)]
    from_plain = [difference(_local(a), _local(b)) for a, b in zip(found, plain, strict=True)]
    return max(from_whole), max(from_plain), HISTORY.since(mark)


def _as_dtensor(gradient: Tensor) -> DTensor:
    assert isinstance(gradient, DTensor)
    return gradient


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
