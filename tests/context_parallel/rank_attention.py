"""Helpers that run on the ranks: train one step under context parallelism and on the whole sequence."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.context_parallel.model import Net
from tests.models.compare import uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.tools.planner.ring_attention import ring_attention

POSITIONS, BATCH, WIDTH = 64, 2, 64
"""torch's memory-efficient attention (GPUs, fp32) needs a multiple of 32 positions in each half of a rank's sequence."""


def train(forward: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, the gradient of `x` and those of the parameters."""
    x = x.clone().requires_grad_()
    y = forward(x)
    (y * y).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


class _InRankOrder(TorchDispatchMode):
    """Computes a reduce_scatter in the order of the ranks, as ours does. gloo adds up in that of its ring."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.reduce_scatter_tensor.default:
            x, by, _, group = args
            assert by == "sum"
            return self._reduce_scatter(x, 0, group)
        if func is torch.ops.cplib.flex_cp_allgather_backward.default:
            *gradients, dim, group = args
            return tuple(self._reduce_scatter(x, dim, group) for x in gradients)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
        process_group = compat.group_of(group)
        everything = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(process_group.size())]
        dist.all_gather(everything, x.contiguous(), group=process_group)
        shards = [part.chunk(process_group.size(), dim)[process_group.rank()].float() for part in everything]
        return functools.reduce(torch.add, shards).to(x.dtype)


def compare_forms(
    rank: int,
    world: int,
    form: str,
    options: dict[str, Any],
    rotation: str = "",
    load_balance: bool = False,
    causal: bool = False,
    device: str = "cpu",
    checkpointed: bool = False,
    kv_heads: int = 0,
    dtype: torch.dtype = torch.float32,
    mesh: DeviceMesh | None = None,
) -> tuple[float, list[Plan]]:
    """Return the largest difference from training on the whole sequence, and the plans of this rank.

    Compiled results have the bits of eager ones on the CPU, and on GPUs with deterministic algorithms, where both add up in the
    order of ranks. Bits of gradients differ where keys are repeated for several heads (`kv_heads`): ours adds those up first.

    `mesh`: the ranks of torch's ring, else all. `rotation`: of torch's ring attention, with which `form` is "sdpa".
    `checkpointed`: backward computes each attention again.
    """
    mesh = mesh or init_device_mesh(device, (world,))
    sequence = torch.randn(BATCH, POSITIONS * world, WIDTH, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    whole, model = (Net(f, causal, kv_heads=kv_heads).to(device, dtype) for f in ("whole", form))
    expected = train(whole, whole, sequence)
    for layer in model.layers if checkpointed else ():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    mark = HISTORY.mark()
    with contextlib.ExitStack() as stack:
        stack.enter_context(uncached())
        own = [sequence.clone(), *(t.clone() for t in expected[:2])]
        if rotation:
            stack.enter_context(ring_attention(rotation, load_balance))
            stack.enter_context(context_parallel(mesh, buffers=own, buffer_seq_dims=[1] * 3))
        else:
            own = [t.chunk(world, 1)[rank] for t in own]
        with _InRankOrder() if world > 2 else contextlib.nullcontext():  # of 2 addends the order makes no difference
            eager = train(model, model, own[0])
        model.zero_grad(set_to_none=True)
        found = train(torch.compile(model, backend="ub_overlap", options=options), model, own[0])
        repeats_bits = device == "cpu" or torch.are_deterministic_algorithms_enabled()
        same = torch.equal if repeats_bits and not kv_heads else lambda a, b: difference(a, b) < 1e-5
        assert all(same(a, b) for a, b in zip(found, eager, strict=True)), "compiled and eager results differ"
        assert not repeats_bits or torch.equal(found[0], eager[0]), "forward adds up nothing between ranks"
        worst = [difference(a, b) for a, b in zip(found[:2], own[1:], strict=True)]
    for gradient, reference in zip(found[2:], expected[2:], strict=True):
        dist.all_reduce(gradient)
        worst.append(difference(gradient, reference))
    return max(worst), HISTORY.since(mark)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())
