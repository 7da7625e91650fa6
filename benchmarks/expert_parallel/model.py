"""A layer of a mixture of experts, with its experts on all ranks: x + experts(norm(x)) + shared(norm(x)).

As torchtitan's AllToAllTokenDispatcher: rows are sorted by expert, counts are exchanged and read by the host, rows are sent to
the ranks of their experts, multiplied by grouped matmuls, and sent back. Routes are made up: they are balanced or skewed.

Legend: T tokens of a rank, D width, F width of an expert, E experts, k experts per token, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..blocks.model import linear


@dataclass(frozen=True)
class ExpertSizes:
    """`shared`: width of the shared expert."""

    dim: int
    hidden: int
    shared: int
    top: int


SIZES = {
    "16b": ExpertSizes(dim=2048, hidden=1408, shared=2816, top=6),
    "236b": ExpertSizes(dim=5120, hidden=1536, shared=3072, top=6),
    "tiny": ExpertSizes(dim=32, hidden=48, shared=64, top=2),
}
"""The routed layers of DeepSeek-V2-Lite (16B) and DeepSeek-V2 (236B), with as many experts as asked for."""
ROUTINGS = ("balanced", "skewed")


def make_routes(tokens: int, experts: int, top: int, routing: str, rank: int) -> tuple[Tensor, Tensor]:
    """Return the chosen experts [T, k] and their scores. Skewed: an expert gets less than the one before, as by Zipf's law."""
    made = torch.Generator().manual_seed(rank)
    if routing == "balanced":
        chosen = (torch.arange(tokens)[:, None] * top + torch.arange(top)) % experts
    else:
        weights = 1.0 / torch.arange(1, experts + 1)
        chosen = torch.multinomial(weights.expand(tokens, -1), top, generator=made)
    return chosen, torch.rand(tokens, top, generator=made)


class RoutedExperts(nn.Module):
    """The experts of one rank, [T, D] -> [T, D]. Without `group` all rows stay, at the experts of this rank."""

    def __init__(self, sizes: ExpertSizes, own: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.own, self.group = own, group
        self.replacement: Callable[[Tensor, list[int], list[int]], Tensor] | None = None
        """What exchanges rows instead of c10d: (rows, received from each rank, sent to each)."""
        self.ranks = 1 if group is None else group.size()
        self.up = nn.Parameter(torch.randn(own, sizes.hidden, sizes.dim) / sizes.dim**0.5)
        self.gate = nn.Parameter(torch.randn(own, sizes.hidden, sizes.dim) / sizes.dim**0.5)
        self.down = nn.Parameter(torch.randn(own, sizes.dim, sizes.hidden) / sizes.hidden**0.5)

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        chosen = chosen if self.group is not None else chosen % self.own
        order = torch.argsort(chosen.reshape(-1), stable=True)
        tokens = order // chosen.shape[1]
        counts = F.one_hot(chosen.reshape(-1), self.own * self.ranks).sum(0)
        results = self._run(x[tokens], counts) if self.group is None else self._exchange(x[tokens], counts, self.group)
        weighted = results * scores.reshape(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, tokens, weighted.to(x.dtype))

    def _exchange(self, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the results of rows that are sorted by expert, computed by the ranks of these."""
        with torch.no_grad():
            received = funcol.all_to_all_single(counts, None, None, group).view(self.ranks, -1)
            sent, got = counts.view(self.ranks, -1).sum(1).tolist(), received.sum(1).tolist()
        rows = self._exchange_rows(rows, got, sent)
        experts = torch.arange(self.own, device=rows.device).repeat(self.ranks)
        by_expert = torch.argsort(torch.repeat_interleave(experts, received.view(-1), output_size=sum(got)), stable=True)
        results = self._run(rows[by_expert], received.sum(0))
        results = torch.empty_like(results).index_put((by_expert,), results)
        return self._exchange_rows(results, sent, got)

    def _exchange_rows(self, rows: Tensor, got: list[int], sent: list[int]) -> Tensor:
        if self.replacement is not None:
            return self.replacement(rows, got, sent)
        return funcol.all_to_all_single_autograd(rows, got, sent, self.group)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = torch.cumsum(counts, 0).to(torch.int32)
        inner = F.silu(torch._grouped_mm(rows, self.gate.transpose(-2, -1), offs=ends))
        inner = inner * torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(inner, self.down.transpose(-2, -1), offs=ends)


class ExpertBlock(nn.Module):
    """[T, D] -> [T, D]: norm, routed experts and shared expert. Each token is computed by itself."""

    def __init__(self, sizes: ExpertSizes, own: int, group: dist.ProcessGroup | None, has_shared: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.dim)
        self.experts = RoutedExperts(sizes, own, group)
        self.up = linear(sizes.dim, sizes.shared) if has_shared else None
        self.down = linear(sizes.shared, sizes.dim) if has_shared else None

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        h = self.norm(x)
        out = x + self.experts(h, chosen, scores)
        return out if self.up is None or self.down is None else out + self.down(F.silu(self.up(h)))


class ExpertLayer(nn.Module):
    """A block whose routes are those of all calls, [T, D] -> [T, D]."""

    def __init__(
        self, sizes: ExpertSizes, own: int, routes: tuple[Tensor, Tensor], group: dist.ProcessGroup | None, has_shared: bool
    ) -> None:
        super().__init__()
        self.block = ExpertBlock(sizes, own, group, has_shared)
        self.chosen: Tensor
        self.scores: Tensor
        self.register_buffer("chosen", routes[0])
        self.register_buffer("scores", routes[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.chosen, self.scores)  # type: ignore[no-any-return]


class CheckpointedLayer(nn.Module):
    """A layer that backward computes again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]
