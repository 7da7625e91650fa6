"""A residual network of MoE layers, whose experts are on all ranks of a group, or on one.

Legend: T tokens of a rank, D width, F width of an expert, E experts, k experts per token, R ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ub_overlap import _torch_compat as compat


class Experts(nn.Module):
    """SwiGLU experts `first` to `first + own - 1`. (rows sorted by expert [N, D], rows of each [own]) -> [N, D], in bf16."""

    def __init__(self, width: int, hidden: int, experts: int, first: int, own: int) -> None:
        super().__init__()
        shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
        for name, (rows, columns) in shapes.items():
            every = torch.randn(experts, rows, columns) / columns**0.5  # drawn alike on all ranks
            self.register_parameter(name, nn.Parameter(every[first : first + own].clone()))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = torch.cumsum(counts, 0).to(torch.int32)
        gate, up, down = (getattr(self, name).bfloat16().transpose(-2, -1) for name in ("gate", "up", "down"))
        inner = F.silu(F.grouped_mm(x, gate, offs=ends)) * F.grouped_mm(x, up, offs=ends)
        return F.grouped_mm(inner, down, offs=ends)


class MoELayer(nn.Module):
    """x + experts(norm(x)) + shared(norm(x)), [T, D] -> [T, D]. Without `group` all experts are here."""

    def __init__(self, width: int, hidden: int, experts: int, top: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.count, self.top, self.group = experts, top, group
        self.ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        if experts % self.ranks:
            raise ValueError(f"{experts} experts on {self.ranks} ranks: expected a multiple")
        own = experts // self.ranks
        self.norm = nn.RMSNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, hidden, experts, rank * own, own)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores, chosen = torch.topk(torch.softmax(self.router(h).float(), dim=-1), self.top, dim=-1)
        order = torch.argsort(chosen.reshape(-1), stable=True)  # rows by expert
        tokens = order // self.top
        counts = F.one_hot(chosen.reshape(-1), self.count).sum(0)
        rows = h.bfloat16()[tokens]  # grouped matmuls take bf16; so do the exchanges
        results = self.experts(rows, counts) if self.group is None else self._exchange(rows, counts, self.group)
        weighted = (results * scores.reshape(-1)[order].unsqueeze(1)).to(x.dtype)
        shared = self.down(F.silu(self.up(h)))  # independent of the exchanges: it hides them
        return x + torch.zeros_like(x).index_add(0, tokens, weighted) + shared

    def _exchange(self, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the results of rows sorted by expert: sent to the ranks of the experts, and back."""
        with torch.no_grad():
            even = [counts.shape[0] // self.ranks] * self.ranks
            received = compat.all_to_all_with_gradient(counts, even, even, group).view(self.ranks, -1)
            sent, got = counts.view(self.ranks, -1).sum(1).tolist(), received.sum(1).tolist()
        rows = compat.all_to_all_with_gradient(rows, got, sent, group)
        own = torch.arange(received.shape[1], device=rows.device).repeat(self.ranks)  # sorted by rank, then by expert
        by_expert = torch.argsort(torch.repeat_interleave(own, received.reshape(-1), output_size=sum(got)), stable=True)
        results = self.experts(rows[by_expert], received.sum(0))
        results = torch.empty_like(results).index_put((by_expert,), results)
        return compat.all_to_all_with_gradient(results, sent, got, group)


def build(width: int, hidden: int, experts: int, top: int, layers: int, group: dist.ProcessGroup | None) -> nn.Sequential:
    """Return the layers; weights are the same for all groups, and None."""
    torch.manual_seed(0)
    return nn.Sequential(*(MoELayer(width, hidden, experts, top, group) for _ in range(layers)))
