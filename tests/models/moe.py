"""Mixture of experts with expert parallelism: tokens are exchanged with the ranks of their experts, and their results back.

    router -> sort by expert -> counts -> dispatch (all_to_all) -> experts -> combine (all_to_all) -> weighted sum (+ shared)

As torchtitan's AllToAllTokenDispatcher has it, whose module needs Triton. Numbers of tokens are read from the device, so they
are unbacked symbols.
Legend: T tokens of a rank, D width, F width of an expert, E experts, k experts per token, R ranks.
"""

from __future__ import annotations

import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.case import Case, Expected, device, noise, settle

MARGIN = 8.0
"""Added to the scores of the experts that a test routes a token to, so that rounding changes no route."""


class Experts(nn.Module):
    """SwiGLU experts of one rank. Rows [N, D], sorted by expert, and rows of each expert [E / R] -> [N, D].

    form "grouped": grouped matmuls, a loop over experts in float64; "loop": rows of each expert are cut out and multiplied.
    """

    def __init__(self, experts: int, dim: int, hidden: int, form: str) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, dim) / dim**0.5)
        self.gate = nn.Parameter(torch.randn(experts, hidden, dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)
        self.form = form

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if self.form == "grouped" and x.dtype == torch.bfloat16:
            ends = torch.cumsum(counts, 0).to(torch.int32)
            inner = F.silu(torch._grouped_mm(x, self.gate.transpose(-2, -1), offs=ends))
            inner = inner * torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends)
            return torch._grouped_mm(inner, self.down.transpose(-2, -1), offs=ends)
        rows = counts.tolist()
        for n in rows:
            torch._check(n >= 0)
        pieces = torch.split(x, rows)
        return torch.cat([self._expert(piece, e) for e, piece in enumerate(pieces)])

    def _expert(self, x: Tensor, e: int) -> Tensor:
        return (F.silu(x @ self.gate[e].t()) * (x @ self.up[e].t())) @ self.down[e].t()


class MoE(nn.Module):
    """[T, D] -> [T, D]. `route` [T, E] is added to the scores."""

    def __init__(self, dim: int, hidden: int, experts: int, k: int, group: dist.ProcessGroup, form: str, shared: bool) -> None:
        super().__init__()
        self.group, self.ranks, self.count, self.k = group, group.size(), experts, k
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(experts // self.ranks, dim, hidden, form)
        self.shared = (
            nn.ModuleList([nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)]) if shared else None
        )

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        top, chosen = torch.topk(self.router(x) + route, self.k, dim=1)
        scores = torch.sigmoid(top - MARGIN)
        order = torch.argsort(chosen.view(-1), stable=True)  # rows by expert
        tokens = order // self.k
        counts = F.one_hot(chosen.view(-1), self.count).sum(0)
        received = self._exchange_counts(counts)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        got = received.sum(1).tolist()
        rows = funcol.all_to_all_single_autograd(x[tokens], got, sent, self.group)
        by_expert = self._sort(received, sum(got))
        results = self.experts(rows[by_expert], received.sum(0))
        results = torch.empty_like(results).index_put((by_expert,), results)
        back = funcol.all_to_all_single_autograd(results, sent, got, self.group)
        weighted = back * scores.view(-1)[order].unsqueeze(1)
        out = torch.zeros_like(x).index_add(0, tokens, weighted)
        if self.shared is not None:
            out = out + self.shared[1](F.silu(self.shared[0](x)))
        return out

    @torch.no_grad()
    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """Return the rows that each rank has for each expert of this one, [R, E / R]."""
        return funcol.all_to_all_single(counts, None, None, self.group).view(self.ranks, -1)

    def _sort(self, received: Tensor, rows: int) -> Tensor:
        """Return the order that sorts received rows, which are sorted by rank, by expert."""
        experts = torch.arange(received.shape[1], device=received.device).repeat(self.ranks)
        return torch.argsort(torch.repeat_interleave(experts, received.view(-1), output_size=rows), stable=True)


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
    dim: int = 16,
    hidden: int = 32,
    exact: bool = False,
) -> Case:
    """`tokens`: of each rank. Two experts a rank, two experts per token."""
    torch.manual_seed(0)
    experts, k, dtype = 2 * world, 2, torch.bfloat16
    group = dist.group.WORLD
    assert group is not None
    module = MoE(dim, hidden, experts, k, group, form, shared)
    with torch.no_grad():
        for i, p in enumerate(module.experts.parameters()):
            p.copy_(noise(tuple(p.shape), 10 * i + rank, torch.float32, False, grad=False) / p.shape[-1] ** 0.5)
    settle(module, dtype, exact)
    x = noise((tokens[rank], dim), 100 + rank, dtype, exact)
    route = routes(tokens[rank], experts, k, routing, rank).to(device(), x.dtype)
    return Case(module, (x, route), Expected(), context=lambda: torch._dynamo.config.patch(capture_scalar_outputs=True))
