"""Train a pipeline of stages whose messages go through ub_overlap, and compare losses and gradients with one process.

    torchrun --nproc-per-node 4 -m examples.pipeline.train --tp 2 --schedule Interleaved1F1B --compile
    torchrun --nproc-per-node 4 -m examples.pipeline.train --schedule ZBVZeroBubble --compile --defer
    torchrun --nproc-per-node 4 -m examples.pipeline.train --dp 2 --microbatches 4 --schedule ZBVZeroBubble --compile --defer

With --defer a stage sends the gradient of its input before it computes weight gradients, and zero-bubble schedules split
backward there. Without it, the first part of their backward computes all gradients of compiled stages.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

import ub_overlap

from .model import ResidualMlp, build_stages, make_blocks, names_of_blocks

LEARNING_RATE = 0.1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="Interleaved1F1B", help="a schedule of torch.distributed.pipelining")
    parser.add_argument("--tp", type=int, default=1, help="ranks of a stage; the others are pipeline ranks")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dp", type=int, default=1, help="ranks that share each stage and take a part of the batch each")
    parser.add_argument("--data-parallel", choices=("fsdp", "ddp"), default="fsdp", help="with --dp: fully_shard, or DDP")
    parser.add_argument("--compile", action="store_true", help='compile the stages with backend="ub_overlap"')
    parser.add_argument("--defer", action="store_true", help="with --compile: option defer_weight_gradients of the backend")
    parser.add_argument("--overlap", default="auto", help="with --compile: option `overlap` of the backend")
    parser.add_argument("--inner", default="inductor", help="what compiles the rewritten graphs: inductor or aot_eager")
    return parser.parse_args(arguments)


def make_data(flags: argparse.Namespace, device: torch.device, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one step, equal on all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    sizes = (2, flags.batch, flags.sequence, flags.width)
    both = torch.randn(sizes, generator=generator).to(device)
    return both[0], both[1]


def one_process(flags: argparse.Namespace, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all steps and the gradients of the first, without pipeline."""
    blocks = make_blocks(flags.blocks, flags.width, 4 * flags.width, device)
    parameters = {f"{index}.{name}": p for index, block in blocks.items() for name, p in block.named_parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(flags.steps):
        x, target = make_data(flags, device, step)
        for block in blocks.values():
            x = block(x)
        loss = torch.nn.functional.mse_loss(x, target)
        loss.backward()
        losses.append(loss.item())
        for name, parameter in parameters.items() if step == 0 else ():
            assert parameter.grad is not None, f"block {name} has no gradient"
            gradients[name] = parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def worst_error(blocks: dict[str, ResidualMlp], own: list[str], expected: dict[str, Tensor]) -> float:
    """Return the largest error of this rank's gradients, relative to the largest gradient of each parameter."""
    errors: list[Tensor] = []
    for index in own:
        for name, parameter in blocks[index].named_parameters():
            gradient = parameter.grad
            assert gradient is not None, f"block {index}: {name} has no gradient"
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            want = expected[f"{index}.{name}"]
            errors.append((whole - want).abs().max() / want.abs().max())
    return torch.stack(errors).max().item()  # NaN if one is


def train(flags: argparse.Namespace) -> dict[str, Any]:
    """Run the steps. Return their losses, the largest error of these, and that of the gradients of the first step."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    ranks = dist.get_world_size()
    sizes = (ranks // (flags.dp * flags.tp), flags.dp, flags.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    dp_rank, tp_rank = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    blocks = make_blocks(flags.blocks, flags.width, 4 * flags.width, device)
    options = {"inner": flags.inner, "overlap": flags.overlap, "defer_weight_gradients": flags.defer}
    stages = build_stages(blocks, flags.schedule, mesh, device, flags.compile, options, flags.data_parallel)
    own = sorted(name for stage in stages for name in names_of_blocks(stage))

    def loss_of(y: Tensor, target: Tensor) -> Tensor:
        """Return this rank's share of the mean over all of the sequence."""
        return torch.nn.functional.mse_loss(y, target) / flags.tp

    schedule_class = get_schedule_class(flags.schedule)
    is_single = len(stages) == 1
    schedule = schedule_class(stages[0] if is_single else stages, flags.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for name in own for p in blocks[name].parameters()], lr=LEARNING_RATE)
    expected_losses, expected = one_process(flags, device)
    losses, error = [], 0.0
    for step in range(flags.steps):
        parts = (part.chunk(flags.dp)[dp_rank].chunk(flags.tp, 1)[tp_rank] for part in make_data(flags, device, step))
        x, target = (part.contiguous() for part in parts)
        inputs = (x,) if any(stage.is_first for stage in stages) else ()
        is_last = any(stage.is_last for stage in stages)
        shares: list[Tensor] = []
        # After two steps all is compiled: anything else is an error.
        with torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"):
            schedule.step(*inputs, target=target if is_last else None, losses=shares if is_last else None)
        total = torch.stack(shares).mean().detach() if is_last else torch.zeros((), device=device)
        dist.all_reduce(total)  # the last stage's ranks have the shares, the others zero
        losses.append(total.item() / flags.dp)
        if step == 0:
            error = worst_error(blocks, own, expected)
        optimizer.step()
        optimizer.zero_grad()
    loss_errors = torch.tensor(losses) / torch.tensor(expected_losses) - 1
    return {"losses": losses, "loss_error": loss_errors.abs().max().item(), "gradient_error": error}


def main() -> None:
    flags = parse()
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo")
    result = train(flags)
    if dist.get_rank() == 0:
        print(f"losses {', '.join(f'{loss:.6f}' for loss in result['losses'])}")
        error, gradients = result["loss_error"], result["gradient_error"]
        print(f"largest errors against one process: losses {error:.1e}, gradients of the first step {gradients:.1e}")
        if flags.compile and flags.tp > 1:
            print(ub_overlap.reports())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
