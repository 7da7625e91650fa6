"""A feed-forward layer of routed experts, with expert parallelism, as torchtitan's token dispatcher has it.

    router -> sort rows by expert -> counts -> dispatch (all_to_all) -> experts -> combine (all_to_all) -> weighted sum + shared

The planner takes tokens as balanced, as predictions do (compiler/cost/assumed_sizes.py). So numbers of rows are constants here;
a compilation reads them from the device.

Legend: T tokens of this rank, D hidden, F width of an expert, E experts, k experts of a token, R ranks that share the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.tokens.in_halves import in_halves

from .sizes import PlannedBlock


class OwnExperts(nn.Module):
    """The experts of one rank. (rows sorted by expert [N, D], rows of each expert [E / R]) -> [N, D].

    With a group of further ranks that have the same experts, each stores its share of the rows of every weight (ZeRO-3).
    """

    def __init__(self, s: PlannedBlock, group: Any) -> None:
        super().__init__()
        self.own, self.group, self.hidden, self.ffn = s.experts // s.ep, group, s.hidden, s.ffn
        ffn_rows, hidden_rows = (self.own * n // s.expert_replicas for n in (s.ffn, s.hidden))
        self.w1 = nn.Parameter(torch.empty(ffn_rows, s.hidden))
        self.w2 = nn.Parameter(torch.empty(hidden_rows, s.ffn))
        self.w3 = nn.Parameter(torch.empty(ffn_rows, s.hidden)) if s.gated else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = torch.cumsum(counts, 0).to(torch.int32)
        inner = F.grouped_mm(x, self._whole(self.w1, self.ffn), offs=ends)
        if self.w3 is None:
            inner = F.gelu(inner, approximate="tanh")
        else:
            inner = F.silu(inner) * F.grouped_mm(x, self._whole(self.w3, self.ffn), offs=ends)
        return F.grouped_mm(inner, self._whole(self.w2, self.hidden), offs=ends)

    def _whole(self, weight: Tensor, rows: int) -> Tensor:
        """Return a weight of `rows` rows an expert, as the right operand."""
        whole = weight if self.group is None else compat.all_gather_with_gradient(weight, 0, self.group)
        return whole.view(self.own, rows, -1).transpose(-2, -1)


class PlannedExperts(nn.Module):
    """[B, S/R, D] of this rank -> the same. `shared`: a layer that gets all tokens, too."""

    def __init__(self, s: PlannedBlock, mesh: DeviceMesh | None, shared: nn.Module | None) -> None:
        super().__init__()
        self.count, self.top, self.ranks = s.experts, s.experts_per_token, s.ep
        self.group = mesh.get_group("ep") if mesh is not None and s.ep > 1 else None
        self.router = nn.Linear(s.hidden, s.experts, bias=False)
        self.experts = OwnExperts(s, mesh.get_group("replicas") if mesh is not None and s.expert_replicas > 1 else None)
        self.shared, self.halves = shared, s.halves

    def forward(self, x: Tensor) -> Tensor:
        return in_halves(self._whole, [x], int(x.shape[0] == 1)) if self.halves else self._whole(x)

    def _whole(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = torch.topk(torch.softmax(self.router(tokens).float(), -1), self.top, -1)
        order = torch.argsort(chosen.reshape(-1), stable=True)  # rows by expert
        place = order // self.top
        counts = torch.zeros(self.count, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, chosen.reshape(-1), torch.ones_like(order))
        rows = tokens[place]
        results = self.experts(rows, counts) if self.group is None else self._exchange(rows, counts, self.group)
        weighted = results * scores.reshape(-1)[order].unsqueeze(1).to(x.dtype)
        out = torch.zeros_like(tokens).index_add(0, place, weighted).view_as(x)
        return out if self.shared is None else out + self.shared(x)

    def _exchange(self, rows: Tensor, counts: Tensor, group: Any) -> Tensor:
        """Return the results of rows sorted by expert: sent to the ranks of the experts, and back."""
        exchange: Callable[..., Tensor] = compat.all_to_all_with_gradient
        own, part = self.count // self.ranks, rows.shape[0] // self.ranks
        splits = [part] * self.ranks
        with torch.no_grad():
            received = exchange(counts, [own] * self.ranks, [own] * self.ranks, group)
        rows = exchange(rows, splits, splits, group)
        experts = torch.arange(own, device=rows.device).repeat(self.ranks)  # rows are sorted by rank, then by expert
        by_expert = torch.argsort(torch.repeat_interleave(experts, received, output_size=rows.shape[0]), stable=True)
        results = self.experts(rows[by_expert], received.view(self.ranks, own).sum(0))
        results = torch.empty_like(results).index_put((by_expert,), results)
        return exchange(results, splits, splits, group)
