"""The MoE blocks of transformers with expert parallelism by hand: their experts are replaced by those of one rank.

Their blocks share one interface, `experts(tokens, chosen, scores)`. The plain block is the reference: it gets the tokens of all
ranks, so its gradients of an expert are those of the rank that has it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import Tensor, nn

from tests.models.compare import uncached
from tests.models.moe import run_on_experts
from ub_overlap.compiler.reports.history import HISTORY

EXPERTS, WIDTH, TOKENS = 4, 32, 12
STRATEGIES = ["none", "split", "split", "split", "split"]
"""Of a block whose exchanges are split: counts stay plain; dispatch and combine, in forward and backward, do not."""


class RankExperts(nn.Module):
    """The experts `first` to `first + count - 1` of a block's. (tokens [T, D], chosen [T, k], scores [T, k]) -> [T, D]."""

    def __init__(self, experts: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        share = EXPERTS // group.size()
        mine = slice(group.rank() * share, (group.rank() + 1) * share)
        self.gate_up = nn.Parameter(experts.gate_up_proj.detach()[mine].clone())
        self.down = nn.Parameter(experts.down_proj.detach()[mine].clone())
        self.act, self.group = experts.act_fn, group

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        return run_on_experts(x, chosen, scores, self._run, EXPERTS, self.group)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        pieces = torch.split(rows, counts.tolist())
        results = []
        for e, piece in enumerate(pieces):
            gate, up = (piece @ self.gate_up[e].t()).chunk(2, dim=-1)
            results.append((self.act(gate) * up) @ self.down[e].t())
        return torch.cat(results)


def make_block(kind: str) -> Any:
    """Return a block of transformers with random weights, in float32."""
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_experts_per_tok": 2, "num_attention_heads": 2}
    if kind == "mixtral":
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        config: Any = MixtralConfig(**sizes, num_local_experts=EXPERTS, intermediate_size=48)
    elif kind == "qwen3_moe":
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        config = Qwen3MoeConfig(**sizes, num_experts=EXPERTS, moe_intermediate_size=48)
    else:
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE as Block

        config = DeepseekV3Config(
            **sizes, n_routed_experts=EXPERTS, n_shared_experts=1, moe_intermediate_size=48, n_group=2, topk_group=1
        )
    config._experts_implementation = "eager"
    block = Block(config)
    made = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn(p.shape, generator=made) / p.shape[-1] ** 0.5)
    return block


def compare_block(
    rank: int, world: int, kind: str, options: dict[str, Any], routing: str = "random", device: str = "cpu"
) -> tuple[float, list[tuple[str, str, str]]]:
    """Return the largest error against the plain block, and (phase, kind, strategy) of the decisions.

    `routing`: "random"; "first", all tokens go to the first two experts; or "absent", the last rank has no tokens.
    """
    group = dist.group.WORLD
    assert group is not None
    ends = [TOKENS * (r + 1) for r in range(world)]
    if routing == "absent":
        ends[-1] -= TOKENS
    everything = torch.randn(1, ends[-1], WIDTH, generator=torch.Generator().manual_seed(5))
    everything, plain, block = everything.to(device), make_block(kind).to(device), make_block(kind).to(device)
    if routing == "first":
        everything[..., 0] = 1.0
        for gate in (plain.gate, block.gate):
            gate.weight.data[:2, 0] += 50.0
    x = everything.clone().requires_grad_()
    truth = plain(x)
    truth.square().sum().backward()
    assert x.grad is not None

    block.experts = RankExperts(block.experts, group)
    mine = slice(TOKENS * rank, ends[rank])
    own = everything[:, mine].clone().requires_grad_()
    mark = HISTORY.mark()
    with uncached(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        result = torch.compile(block, backend="ub_overlap", fullgraph=True, options=options)(own)
        result.square().sum().backward()
    assert own.grad is not None
    experts = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    pairs = [(result, truth[:, mine]), (own.grad, x.grad[:, mine])]
    pairs += [(block.experts.gate_up.grad, plain.experts.gate_up_proj.grad[experts])]
    pairs += [(block.experts.down.grad, plain.experts.down_proj.grad[experts])]
    whole = dict(plain.named_parameters())
    for name, p in block.named_parameters():
        if not name.startswith("experts."):  # the router and the shared experts: each rank has the gradient of its tokens
            dist.all_reduce(p.grad)
            pairs.append((p.grad, whole[name].grad))
    error = max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs if a.numel())
    found = [(d.phase, d.kind.value, str(d.strategy)) for plan in HISTORY.since(mark) for d in plan.decisions]
    return error, found
