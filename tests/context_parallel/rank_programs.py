"""Helpers that run on the ranks: context parallelism with tensor parallelism, with FlexAttention, and in torchtitan's Llama."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as cp
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.nn.attention.flex_attention import create_block_mask

from tests.context_parallel import rank_attention
from tests.context_parallel.model import Net, flex_gradients_on_cpu
from tests.context_parallel.rank_attention import BATCH, WIDTH, difference, train
from tests.models.compare import uncached
from tests.models.torchtitan_llama import configuration, package
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.tools.planner.ring_attention import ring_attention

POSITIONS = 32


def compare_with_tensor_parallelism(
    rank: int, world: int, form: str, options: dict[str, Any], load_balance: bool, causal: bool, device: str = "cpu"
) -> tuple[float, list[Plan]]:
    """Return the largest difference from training on the whole sequence on one rank, and the plans of this rank.

    Two ranks share a sequence, and two the heads of each layer. The ring has one gather.
    """
    mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("cp", "tp"))
    positions = (POSITIONS if device == "cpu" else rank_attention.POSITIONS) * world // 2
    sequence = torch.randn(BATCH, positions, WIDTH, generator=torch.Generator().manual_seed(5)).to(device)
    whole, model = Net("whole", causal).to(device), Net(form, causal, mesh=mesh).to(device)
    expected = train(whole, whole, sequence)
    mark = HISTORY.mark()
    with uncached(), ring_attention(load_balance=load_balance) if form == "ring" else contextlib.nullcontext():
        balancer = _HeadTailLoadBalancer(sequence.shape[1], world // 2, device) if load_balance else None
        parts = cp._context_parallel_shard(mesh["cp"], [sequence, *expected[:2]], [1] * 3, balancer)
        own = [_tensor(t).chunk(2, 1)[mesh.get_local_rank("tp")].contiguous() for t in parts]
        found = train(torch.compile(model, backend="ub_overlap", options=options, fullgraph=True), model, own[0])
    worst = [difference(a, b) for a, b in zip(found[:2], own[1:], strict=True)]
    worst += _compare_gradients(found[2:], expected[2:], mesh.get_group("cp"))
    return max(worst), HISTORY.since(mark)


def compare_flex_attention(
    rank: int, world: int, options: dict[str, Any], load_balance: bool, device: str = "cpu"
) -> tuple[float, list[Plan]]:
    """Return the same of FlexAttention with a causal mask and torch's style for context parallelism."""
    mesh, length = init_device_mesh(device, (world,), mesh_dim_names=("cp",)), 128 * world
    sequence = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(5)).to(device)
    whole, model = Net("whole", True, layers=1).to(device), Net("flex", layers=1, mesh=mesh).to(device)
    expected = train(whole, whole, sequence)
    mark = HISTORY.mark()
    before, cp._compiled_create_block_mask = cp._compiled_create_block_mask, create_block_mask  # Inductor takes 10 s for it
    try:
        balancer = _HeadTailLoadBalancer(length, world, device) if load_balance else None
        parts = cp._context_parallel_shard(mesh, [sequence, *expected[:2]], [1] * 3, balancer)
        own = [_tensor(t).contiguous() for t in parts]
        make: Any = cp._create_cp_block_mask
        block = {"BLOCK_SIZE": (128, 128)} if "BLOCK_SIZE" in inspect.signature(make).parameters else {}  # since torch 2.15
        mask = make(_is_causal, 1, 1, length, length, device_mesh=mesh, load_balancer=balancer, **block)
    finally:
        cp._compiled_create_block_mask = before
    with uncached(), flex_gradients_on_cpu() if device == "cpu" else contextlib.nullcontext():
        compiled = torch.compile(model, backend="ub_overlap", options=options, fullgraph=True)
        found = train(lambda x: compiled(x, mask), model, own[0])
    worst = [difference(a, b) for a, b in zip(found[:2], own[1:], strict=True)]
    worst += _compare_gradients(found[2:], expected[2:], mesh.get_group("cp"))
    return max(worst), HISTORY.since(mark)


def _is_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def compare_torchtitan(
    rank: int, world: int, options: dict[str, Any], load_balance: bool, tensor_ranks: int
) -> tuple[float, list[Plan]]:
    """Return the same of torchtitan's Llama, parallelised and fed by torchtitan's own functions.

    Its attention is torch's ring with one gather.
    """
    titan = package()
    shared = world // tensor_ranks
    degrees = {"tensor_parallel_degree": tensor_ranks, "context_parallel_degree": shared}
    parallelism = titan.ParallelismConfig(**degrees, spmd_backend="partial_dtensor")
    titan.set_spmd_backend("partial_dtensor")
    dims = titan.ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    tokens = torch.randint(160, (BATCH, 16 * shared), generator=torch.Generator().manual_seed(11))
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous()
    whole, model = _llama(titan), _llama(titan)
    logits = whole(tokens, positions)
    _loss(logits).backward()
    mark = HISTORY.mark()
    context = titan.get_spmd_context(parallel_dims=dims)
    with uncached(), ring_attention(load_balance=load_balance):
        mesh = dims.get_mesh("cp")
        titan.apply_cp_to_forward([block.attention.inner_attention for block in model.layers.values()], mesh)
        if tensor_ranks > 1:
            model.parallelize(dims)
        extra, balancer = {"positions": positions}, "headtail" if load_balance else None
        own, own_logits, extra = titan.prepare_context_parallel_input(
            tokens, logits.detach(), extra, mesh, torch.device("cpu"), balancer
        )
        with context():
            found = torch.compile(model, backend="ub_overlap", options=options)(own, extra["positions"])
            found = found.full_tensor() if isinstance(found, DTensor) else found
            _loss(found).backward()
    worst = [difference(found.detach(), own_logits)]
    gradients = [[p.grad for p in m.parameters()] for m in (model, whole)]
    worst += _compare_gradients(*gradients, mesh.get_group())
    return max(worst), HISTORY.since(mark)


def _llama(titan: Any) -> nn.Module:
    config = configuration(titan, layers=2, kv_heads=8, fuse_qkv=False)
    titan.set_llama3_sharding_config(config, enable_sp=True)
    torch.manual_seed(7)
    model: Any = config.build()
    model.init_states()
    return model


def _loss(logits: Tensor) -> Tensor:
    return (logits * logits).sum()


def _compare_gradients(found: Any, expected: Any, group: dist.ProcessGroup) -> list[float]:
    """Return the differences of gradients, which are summed over the ranks of context parallelism."""
    worst = []
    for gradient, reference in zip(found, expected, strict=True):
        summed = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
        dist.all_reduce(summed, group=group)
        worst.append(difference(summed, reference))
    return worst


def _tensor(part: object) -> Tensor:
    assert isinstance(part, Tensor)
    return part
