"""Mixture of experts with expert parallelism: tokens are exchanged with the ranks of their experts, and their results back.

    router -> sort by expert -> counts -> dispatch (all_to_all) -> experts -> combine (all_to_all) -> weighted sum (+ shared)

As torchtitan's AllToAllTokenDispatcher has it, whose module needs Triton. Numbers of tokens are read from the device, so they
are unbacked symbols.
Legend: T tokens of a rank, D width, F width of an expert, E experts, k experts per token, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.models.case import Case, Expected, device, noise, settle

MARGIN = 8.0
"""Added to the scores of the experts that a test routes a token to, so that rounding changes no route."""


class Experts(nn.Module):
    """SwiGLU experts of one rank. Rows [N, D], sorted by expert, and rows of each expert [E / R] -> [N, D].

    form "grouped": grouped matmuls, a loop over experts in float64; "loop": rows of each expert are cut out and multiplied.
    `shards`: the group whose ranks have a part of each weight, [E / R, F or D, D or F] along dim 1.
    """

    def __init__(self, experts: int, dim: int, hidden: int, form: str, shards: dist.ProcessGroup | None) -> None:
        super().__init__()
        parts = 1 if shards is None else shards.size()
        self.up = nn.Parameter(torch.empty(experts, hidden // parts, dim))
        self.gate = nn.Parameter(torch.empty(experts, hidden // parts, dim))
        self.down = nn.Parameter(torch.empty(experts, dim // parts, hidden))
        self.form, self.shards = form, shards

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        up, gate, down = (gathered(w, 1, self.shards) for w in (self.up, self.gate, self.down))
        if self.form == "grouped" and x.dtype == torch.bfloat16:
            ends = torch.cumsum(counts, 0).to(torch.int32)
            inner = F.silu(torch._grouped_mm(x, gate.transpose(-2, -1), offs=ends))
            inner = inner * torch._grouped_mm(x, up.transpose(-2, -1), offs=ends)
            return torch._grouped_mm(inner, down.transpose(-2, -1), offs=ends)
        rows = counts.tolist()
        for n in rows:
            torch._check(n >= 0)
        pieces = torch.split(x, rows)
        return torch.cat([(F.silu(x @ gate[e].t()) * (x @ up[e].t())) @ down[e].t() for e, x in enumerate(pieces)])


def gathered(weight: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the whole weight of shards along `dim`."""
    return weight if group is None else funcol.all_gather_tensor_autograd(weight, dim, group)


class Linear(nn.Module):
    """A linear whose weight [rows / R, columns] is gathered from `shards`, if any."""

    def __init__(self, columns: int, rows: int, shards: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
        self.shards = shards
        if shards is not None:
            self.weight = nn.Parameter(self.weight.detach().chunk(shards.size())[shards.rank()].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, gathered(self.weight, 0, self.shards))


class SequenceParallelMLP(nn.Module):
    """x + MLP with tensor parallelism, between sequence shards: gather -> up -> down -> scatter. [T, D] -> [T, D]."""

    def __init__(self, dim: int, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.up, self.down, self.group = Linear(dim, hidden), Linear(hidden, dim), group

    def forward(self, x: Tensor) -> Tensor:
        whole = funcol.all_gather_tensor_autograd(x, 0, self.group)
        return x + funcol.reduce_scatter_tensor_autograd(self.down(F.gelu(self.up(whole))), "sum", 0, self.group)


def run_on_experts(
    x: Tensor, chosen: Tensor, scores: Tensor, experts: Callable[[Tensor, Tensor], Tensor], count: int, group: dist.ProcessGroup
) -> Tensor:
    """Return the sum of the results of the chosen experts, [T, D], times their scores.

    `chosen`, `scores` [T, k]. `experts`: (rows sorted by this rank's experts, rows of each) -> their results. `count`: E.
    """
    ranks = group.size()
    order = torch.argsort(chosen.reshape(-1), stable=True)  # rows by expert
    tokens = order // chosen.shape[1]
    with torch.no_grad():
        counts = F.one_hot(chosen.reshape(-1), count).sum(0)
        received = funcol.all_to_all_single(counts, None, None, group).view(ranks, -1)  # [R, E / R]
        sent = counts.view(ranks, -1).sum(1).tolist()
        got = received.sum(1).tolist()
    rows = funcol.all_to_all_single_autograd(x[tokens], got, sent, group)
    own = torch.arange(count // ranks, device=x.device).repeat(ranks)  # they are sorted by rank, then by expert
    by_expert = torch.argsort(torch.repeat_interleave(own, received.reshape(-1), output_size=sum(got)), stable=True)
    results = experts(rows[by_expert], received.sum(0))
    results = torch.empty_like(results).index_put((by_expert,), results)
    back = funcol.all_to_all_single_autograd(results, sent, got, group)
    weighted = back * scores.reshape(-1)[order].unsqueeze(1).to(back.dtype)
    return torch.zeros_like(x).index_add(0, tokens, weighted)


@dataclass(frozen=True)
class Sizes:
    """Of a layer: D, F, E, k."""

    dim: int
    hidden: int
    experts: int
    k: int = 2


@dataclass(frozen=True)
class Groups:
    """`experts`: ranks that share the experts. `shards`: of the router and the shared expert. `expert_shards`: of experts.
    `tensor`: of the MLP in front."""

    experts: dist.ProcessGroup
    shards: dist.ProcessGroup | None = None
    expert_shards: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None


class MoE(nn.Module):
    """[T, D] -> [T, D]. `route` [T, E] is added to the scores."""

    def __init__(self, sizes: Sizes, groups: Groups, form: str, shared: bool) -> None:
        super().__init__()
        self.sizes, self.groups = sizes, groups
        dim, hidden, shards = sizes.dim, sizes.hidden, groups.shards
        self.front = None if groups.tensor is None else SequenceParallelMLP(dim, hidden, groups.tensor)
        self.router = Linear(dim, sizes.experts, shards)
        self.experts = Experts(sizes.experts // groups.experts.size(), dim, hidden, form, groups.expert_shards)
        self.shared = nn.ModuleList([Linear(dim, hidden, shards), Linear(hidden, dim, shards)]) if shared else None

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        x = x if self.front is None else self.front(x)
        top, chosen = torch.topk(self.router(x) + route, self.sizes.k, dim=1)
        scores = torch.sigmoid(top - MARGIN)
        out = run_on_experts(x, chosen, scores, self.experts, self.sizes.experts, self.groups.experts)
        if self.shared is not None:
            out = out + self.shared[1](F.silu(self.shared[0](x)))
        return out


def find_groups(other: str) -> Groups:
    """Return the groups of all ranks. `other`: "tp", or "fsdp", with 4 ranks of the experts' weights too, or "" for neither.

    With 4 ranks, "tp" is 2 ranks of tensor parallelism x 2 of expert parallelism.
    """
    world = dist.group.WORLD
    assert world is not None
    if other == "tp" and world.size() == 4:
        mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("experts", "tensor"))
        return Groups(mesh.get_group("experts"), tensor=mesh.get_group("tensor"))
    if other == "tp":
        return Groups(world, tensor=world)
    if other == "fsdp" and world.size() == 4:
        mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("shards", "experts"))
        return Groups(mesh.get_group("experts"), world, mesh.get_group("shards"))
    return Groups(world, world if other == "fsdp" else None)


def routes(tokens: int, experts: int, k: int, routing: str, rank: int) -> Tensor:
    """Return what is added to the scores, [T, E]: "even", "skewed" (differs by rank), or "one" (the first k experts)."""
    place = torch.arange(tokens)[:, None] * (1 if routing == "even" else 3 + rank) + torch.arange(k)
    if routing == "skewed":
        place = (place**2) % experts
        place[:, 1:] = (place[:, :1] + torch.arange(1, k)) % experts
    chosen = torch.arange(k).expand(tokens, k) if routing == "one" else place % experts
    return torch.zeros(tokens, experts).scatter(1, chosen, MARGIN)


def build(
    rank: int,
    world: int,
    form: str = "grouped",
    routing: str = "skewed",
    shared: bool = True,
    tokens: tuple[int, ...] = (24, 24, 24, 24),
    other: str = "",
    exact: bool = False,
    k: int = 2,
) -> Case:
    """`tokens`: of each rank. `other`: another parallelism next to it, as in `find_groups`. Two experts a rank.

    `k`: experts per token.
    """
    torch.manual_seed(0)
    dtype, groups = torch.bfloat16, find_groups(other)
    sizes = Sizes(dim=16, hidden=32, experts=2 * groups.experts.size(), k=k)
    module = MoE(sizes, groups, form, shared)
    with torch.no_grad():
        for i, p in enumerate(module.experts.parameters()):
            p.copy_(noise(tuple(p.shape), 10 * i + rank, torch.float32, False, grad=False) / p.shape[-1] ** 0.5)
        if module.front is not None:
            for i, p in enumerate(module.front.parameters()):
                p.copy_(noise(tuple(p.shape), 50 + 10 * i + rank, torch.float32, False, grad=False) / p.shape[-1] ** 0.5)
    settle(module, dtype, exact)
    x = noise((tokens[rank], sizes.dim), 100 + rank, dtype, exact)
    route = routes(tokens[rank], sizes.experts, sizes.k, routing, rank).to(device(), x.dtype)
    return Case(module, (x, route), Expected(), context=lambda: torch._dynamo.config.patch(capture_scalar_outputs=True))
