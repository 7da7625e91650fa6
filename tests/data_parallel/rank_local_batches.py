"""Rank functions of test_local_batches.py: graphs of ranks whose local batches have other sizes.

Legend: M rows of a rank's batch, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.compiler.rank_python_reducer import python_reducer
from tests.models.fsdp import Gathered
from tests.models.moe import build as build_experts
from tests.models.sharded_llama import build as build_sharded_llama
from tests.runtime.rank_failures import attempt
from ub_overlap.compiler.reports.history import HISTORY

DIM, HIDDEN = 512, 1536
"""Of weights large enough that predictions for 16 rows and for 4000 differ."""
ROWS = ((16, 2000), (700, 40), (16, 90))
"""Rows of the even and of the odd ranks, by step."""

Found = tuple[list[str], list[str], set[str]]
"""(what differs from the program without overlap, the plans' digests, the modes of their strategies)."""


class Layers(nn.Module):
    """Residual blocks of linears with gathered weights. [M, D] -> [M, D]."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up = nn.ModuleList(Gathered(HIDDEN, DIM, mesh, None, None) for _ in range(3))
        self.down = nn.ModuleList(Gathered(DIM, HIDDEN, mesh, None, None) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(F.layer_norm(x, (DIM,)))))
        return x


def gathered_layers(world: int) -> Layers:
    torch.manual_seed(3)
    model = Layers(DeviceMesh("cpu", torch.arange(world), mesh_dim_names=("fsdp",)))
    for one in (*model.up, *model.down):
        one.shard()
    return model


def rows_of(rank: int, step: int, width: int = DIM) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS[step][rank % 2], width, generator=generator)


def mark(tensors: Sequence[Tensor], rows: int | None) -> None:
    """Mark the first dim of each as dynamic, with the same hint on all ranks. None: leave them alone."""
    for t in tensors if rows else ():
        torch._dynamo.mark_dynamic(t, 0, hint_override=rows)


def train(
    model: nn.Module, step: Callable[..., Tensor], batches: Sequence[tuple[Tensor, ...]], planned_rows: int | None
) -> list[list[Tensor]]:
    """Return the loss and the gradients of each batch."""
    results = []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        batch = tuple(t.detach() for t in batch)
        mark(batch, planned_rows)
        loss = step(*batch)
        if loss.requires_grad:
            loss.backward()
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None]
        results.append([loss.detach().clone(), *(g.clone() for g in grads)])
    return results


def compare(
    model: nn.Module,
    step: Callable[..., Tensor],
    batches: Sequence[tuple[Tensor, ...]],
    planned_rows: int | None,
    inner: str = "aot_eager",
    dynamic: bool | None = None,
) -> Found:
    """Train as it is, and compiled."""
    torch._dynamo.reset()
    plain = train(model, step, batches, None)
    since = HISTORY.mark()
    options = {"profile": "h200", "min_bytes": 0, "inner": inner}
    own = train(model, torch.compile(step, backend="ub_overlap", options=options, dynamic=dynamic), batches, planned_rows)
    bad = [
        f"step {i}, tensor {j}: {(a - b).abs().max()}"
        for i, (one, two) in enumerate(zip(own, plain, strict=True))
        for j, (a, b) in enumerate(zip(one, two, strict=True))
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())
    ]
    plans = HISTORY.since(since)
    return bad, [p.shared_digest for p in plans], {d.strategy.mode.value for p in plans for d in p.decisions if d.overlapped}


def try_to(compare_all: Callable[[], Found]) -> Found | str:
    """Return the text of the error, if there is one."""
    found: list[Found] = []
    error = attempt(lambda: found.append(compare_all()))
    return found[0] if found else f"{error['error']}: {error['text']}"


def sharded_weights(
    rank: int, world: int, planned_rows: int | None, inner: str = "aot_eager", dynamic: bool | None = None
) -> Found | str:
    """In-graph FSDP."""
    model = gathered_layers(world)
    batches = [(rows_of(rank, step),) for step in range(len(ROWS))]
    return try_to(lambda: compare(model, lambda x: model(x).square().mean(), batches, planned_rows, inner, dynamic))


def sharded_weights_and_tensor_parallel(rank: int, world: int, planned_rows: int | None) -> Found | str:
    """FSDP x tensor parallelism over 2 ranks; each replica has a batch of its own size."""
    model = build_sharded_llama(rank, world, tp=2).module
    replica = rank // 2
    batches = [
        (torch.randint(160, (sizes[replica], 16), generator=torch.Generator().manual_seed(step + 7 * replica)),)
        for step, sizes in enumerate(((2, 64), (40, 6)))
    ]
    return try_to(lambda: compare(model, lambda t: model(t).square().mean(), batches, planned_rows))


def replicated_weights(rank: int, world: int, planned_rows: int | None) -> Found | str:
    """DistributedDataParallel, its all_reduces traced into the backward graph."""
    batches = [(rows_of(rank, step),) for step in range(len(ROWS))]

    def model() -> nn.Module:
        torch.manual_seed(5)
        return DistributedDataParallel(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(6))), bucket_cap_mb=1)

    def run() -> Found:
        with python_reducer():
            net = model()

            def step(x: Tensor) -> Tensor:
                loss = net(x).square().mean()
                loss.backward()
                return loss.detach()

            return compare(net, step, batches, planned_rows)

    return try_to(run)


def experts(rank: int, world: int, planned_rows: int | None) -> Found | str:
    """Experts on all ranks; each rank has its own number of tokens."""
    cases = [build_experts(rank, world, tokens=tuple(ROWS[step][r % 2] for r in range(world))) for step in range(len(ROWS))]
    model = cases[0].module

    def run() -> Found:
        with cases[0].context():
            return compare(model, lambda *x: model(*x).square().mean(), [c.inputs for c in cases], planned_rows)

    return try_to(run)
