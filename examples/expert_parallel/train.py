"""Train MoE layers with expert parallelism, compiled by ub_overlap.

    torchrun --nproc-per-node 2 -m examples.expert_parallel.train
    torchrun --nproc-per-node 2 -m examples.expert_parallel.train --device cpu --inner aot_eager --check

Each rank has tokens of its own and E / R experts. The other weights are equal on all ranks, and their gradients are summed
after backward. --check compares the first step with one process that has all experts and all tokens; take one layer, since
rounding changes routes in later ones.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ub_overlap
from ub_overlap import _torch_compat as compat

from .model import Experts, build


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=2, help="experts of a token")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="of a rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--strategy", choices=("split", "none", "auto"), default="split",
        help='of the all_to_alls; "auto": as predicted, which leaves small ones alone',
    )  # fmt: skip
    parser.add_argument(
        "--split-tokens", choices=("auto", "force", "off"), default="auto", help="layers in two halves of tokens"
    )
    parser.add_argument("--inner", default="inductor", help="what compiles the rewritten graphs: inductor or aot_eager")
    parser.add_argument("--check", action="store_true", help="compare the first step with one process")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def tokens_of(rank: int, step: int, args: argparse.Namespace, device: torch.device) -> Tensor:
    """Return the input of a rank in one step, [T, D]."""
    made = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(args.tokens, args.width, generator=made).to(device)


def loss_of(out: Tensor, ranks: int) -> Tensor:
    """Return this rank's part of the mean over all tokens."""
    return out.square().mean() / ranks


def sum_replicated(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of what all ranks have alike: all but the experts."""
    experts = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    for p in model.parameters():
        if p.grad is not None and id(p) not in experts:
            dist.all_reduce(p.grad, group=group)


def reference_errors(model: nn.Module, args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the largest relative error of a gradient of the first step, against all experts and tokens in one process."""
    whole = build(args.width, args.hidden, args.experts, args.top, args.layers, None).to(device)
    for rank in range(group.size()):
        loss_of(whole(tokens_of(rank, 0, args, device)), group.size()).backward()
    truth, worst = dict(whole.named_parameters()), 0.0
    for name, p in model.named_parameters():
        grad = truth[name].grad
        assert grad is not None and p.grad is not None, f"{name} has no gradient"
        if ".experts." in name:
            grad = grad[group.rank() * p.shape[0] : (group.rank() + 1) * p.shape[0]]
        worst = max(worst, float((p.grad - grad).abs().max() / grad.abs().max().clamp(min=1e-12)))
    return worst


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train on the ranks of the default group. Return losses, and with --check the error of the first step's gradients."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device(f"cuda:{torch.cuda.current_device()}" if args.device == "cuda" else "cpu")
    model = build(args.width, args.hidden, args.experts, args.top, args.layers, group).to(device)
    overrides = [{"kind": "all_to_all", "strategy": args.strategy}] if args.strategy != "auto" else None
    for layer in model:
        ub_overlap.tokenwise(layer)  # routes know no capacity limit: each token is computed by itself
    options: dict[str, Any] = {
        "inner": args.inner,
        "split_tokens": args.split_tokens,
        **({"overrides": overrides} if overrides else {}),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    result: dict[str, Any] = {"losses": []}
    with compat.dynamo_config.patch(capture_scalar_outputs=True):  # numbers of rows are part of the graph
        compiled = torch.compile(model, backend="ub_overlap", options=options, fullgraph=True)
        for step in range(args.steps):
            # After two steps all is compiled: anything else is an error.
            with torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"):
                loss = loss_of(compiled(tokens_of(group.rank(), step, args, device)), group.size())
                loss.backward()
            sum_replicated(model, group)
            if step == 0 and args.check:
                result["gradient_error"] = reference_errors(model, args, group, device)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total, group=group)
            result["losses"].append(total.item())
    return result


def main() -> None:
    args = parse()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    result = train(args)
    if dist.get_rank() == 0:
        print("losses", ", ".join(f"{loss:.4f}" for loss in result["losses"]))
        if args.check:
            print(f"largest relative error of a gradient of the first step: {result['gradient_error']:.1e}")
        print(ub_overlap.reports())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
