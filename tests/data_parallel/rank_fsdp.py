"""Rank functions of test_fsdp.py: fully_shard with our collectives against fully_shard without, and against one fp64 model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

try:  # from torch 2.12 on
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
except ImportError:
    FSDPMeshInfo = ShardPlacementResult = None  # type: ignore[assignment,misc]

import ub_overlap
from tests.harness.later_steps import compiled_before
from tests.runtime.rank_failures import attempt
from tests.runtime.rank_sessions import C, reset
from ub_overlap import _fsdp_compat
from ub_overlap.runtime.data_parallel.eager_collectives import gather_into

BATCH, TOKENS, HIDDEN = 5, 40, 16


class Block(nn.Module):
    """A residual block. No size divides by the ranks but HIDDEN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 33), nn.Linear(33, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(seed: int = 0, prepare: Callable[[Any], None] | None = None, **options: Any) -> Any:
    """Return a model whose blocks and root are sharded with `options`."""
    torch.manual_seed(seed)
    model = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if prepare is not None:
        prepare(model)
    return model


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, TOKENS, (BATCH,), generator=generator)
    return nn.functional.cross_entropy(model(tokens).double(), tokens)


def train(model: Any, rank: int, steps: int = 3, micro: int = 1) -> tuple[list[float], list[Tensor]]:
    """Return the losses, and the local gradients of the first step. `micro`: batches per step; the last one reduces."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], list[Tensor]()
    for step in range(steps):
        with compiled_before(step):
            for part in range(micro):
                if micro > 1:
                    model.set_requires_gradient_sync(part == micro - 1)
                loss = loss_of(model, rank, micro * step + part)
                loss.backward()
                losses.append(loss.item())
        grads = grads or [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


def exact_grads(world: int, micro: int = 1) -> dict[str, Tensor]:
    """Return the mean gradients over ranks of one fp64 model, by parameter."""
    torch.manual_seed(0)
    model = Model().double()
    for rank in range(world):
        for part in range(micro):
            (loss_of(model, rank, part) / world).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cases(rank: int, world: int) -> dict[str, tuple[dict[str, Any], Callable[[Any], None] | None, int]]:
    """Return by name: options of fully_shard, what else is set on the model, batches per step."""
    bf16 = {"param_dtype": torch.bfloat16}
    policies: dict[str, Any] = {
        "fp32": {},
        "bf16, sums of fp32": {"mp_policy": MixedPrecisionPolicy(**bf16, reduce_dtype=torch.float32)},
        "bf16": {"mp_policy": MixedPrecisionPolicy(**bf16)},
        "fp16 gradients": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
        "kept": {"reshard_after_forward": False},
    }
    found = {name: (options, None, 1) for name, options in policies.items()}
    found["accumulation"] = ({}, None, 2)
    found["sums only"] = ({}, lambda model: _each(model, "set_force_sum_reduction_for_comms", True), 1)
    if world == 4:
        found = {"fp32": found["fp32"]}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        found["hybrid"] = ({"mesh": mesh}, None, 1)
        found["hybrid accumulation"] = ({"mesh": mesh}, None, 2)
        found["resharded to 2"] = ({"reshard_after_forward": 2}, None, 1)
    return found


def _each(model: Any, setter: str, value: Any) -> None:
    for module in (model, *model.blocks):
        getattr(module, setter)(value)


def trains_as_torch(rank: int, world: int) -> list[str]:
    """Compare losses of all steps and gradients with torch's collectives bit by bit, 16-bit sums with fp64.

    With 2 ranks a sum has one order. Return what differs, and what ran on no transport of ours.
    """
    bad = []
    for name, (options, prepare, micro) in cases(rank, world).items():
        plain = train(sharded(prepare=prepare, **options), rank, micro=micro)
        C.clear_stats()
        model = sharded(prepare=prepare, **options)
        installation = ub_overlap.fsdp.install(model)
        losses, grads = train(model, rank, micro=micro)
        if len(installation) != 4 or not _used("all_gather") or not _used("reduce_scatter"):
            bad.append(f"{name}: {sorted(_used(''))}")
        rounds = world > 2 or name in ("bf16", "fp16 gradients")
        if losses[:micro] != plain[0][:micro]:
            bad.append(f"{name}: first losses {losses} {plain[0]}")
        if not rounds and losses != plain[0]:
            bad.append(f"{name}: losses {losses} {plain[0]}")
        for (parameter, p), own, theirs in zip(model.named_parameters(), grads, plain[1], strict=True):
            if not (torch.allclose(own, theirs, rtol=1e-2, atol=1e-4) if rounds else torch.equal(own, theirs)):
                bad.append(f"{name}: gradient of {parameter} {(own - theirs).abs().max()}")
            if "bf16" not in name:
                exact = _shard(exact_grads(world, micro)[parameter], p)
                tolerance = 2e-3 if "fp16" in name else 1e-6
                if own.numel() and (own - exact).abs().max() > tolerance:
                    bad.append(f"{name}: gradient of {parameter} is off by {(own - exact).abs().max()}")
    return bad[:6]


def _used(end: str) -> set[str]:
    """Return our sites with a call on shared memory whose name ends so."""
    stats = ub_overlap.site_stats()
    return {site for site, one in stats.items() if site.startswith("/fsdp") and site.endswith(end) and one.transport != "c10d"}


def _shard(whole: Tensor, parameter: Any) -> Tensor:
    """Return this rank's shard of a tensor like `parameter`."""
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def divide_factor(rank: int, world: int) -> list[str]:
    """A factor of its own is PREMUL_SUM, which gloo lacks: gradients are the exact sum divided by it."""
    bad = []
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-3)):
        model = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        _each(model, "set_gradient_divide_factor", 3.0)
        ub_overlap.fsdp.install(model)
        _, grads = train(model, rank, steps=1)
        exact = exact_grads(world)
        for (name, p), grad in zip(model.named_parameters(), grads, strict=True):
            if grad.numel() and (grad - _shard(exact[name] * world / 3.0, p)).abs().max() > tolerance:
                bad.append(f"{dtype} {name}")
    return bad


def asynchronous(rank: int, world: int) -> list[str]:
    """Gathers in flight, waited for in another order, and reads of earlier results between them."""
    model, plain = sharded(), sharded()
    ub_overlap.fsdp.install(model)
    handles = [block.unshard(async_op=True) for block in model.blocks]
    handles.append(model.unshard(async_op=True))
    for handle in reversed(handles):
        handle.wait()
    whole = [[p.detach().clone() for p in block.parameters()] for block in model.blocks]
    for block in plain.blocks:
        block.unshard()
    bad = []
    for i, block in enumerate(plain.blocks):
        if not all(torch.equal(a, b) for a, b in zip(whole[i], block.parameters(), strict=True)):
            bad.append(f"block {i}")
    for module in (model, *model.blocks):
        module.reshard()
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks)  # all gathers start at once
    blocks[-1].set_modules_to_backward_prefetch(blocks[:-1])
    if train(model, rank)[0] != train(sharded(), rank)[0]:
        bad.append("prefetch")
    return bad


def bytes_travel(rank: int, world: int) -> list[str]:
    """Buffers of other dtypes, and of several at once (then bytes), are gathered bit by bit."""
    bad = []
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int64, torch.float64, torch.bool):
        parts = [(torch.arange(37) * (r + 3) % 7).to(dtype) for r in range(world)]
        out = torch.empty(37 * world, dtype=dtype)
        own = out[37 * rank : 37 * (rank + 1)]
        own.copy_(parts[rank])
        gather_into(out, own, name, "/bytes")
        if not torch.equal(out.view(torch.uint8), torch.cat(parts).view(torch.uint8)):
            bad.append(str(dtype))
    return bad


def checkpoints(rank: int, world: int, folder: str) -> list[str]:
    """A checkpoint of a model with our collectives has torch's names and shards, and loads without them."""
    model = sharded()
    ub_overlap.fsdp.install(model)
    train(model, rank, steps=1)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=folder)
    plain = sharded(seed=7)
    loaded = get_model_state_dict(plain)
    bad = [] if list(loaded) == list(state) else ["names"]
    dcp.load(loaded, checkpoint_id=folder)
    return bad + [name for name in state if not torch.equal(loaded[name].to_local(), state[name].to_local())]


class MixedBlock(Block):
    """A block with a frozen parameter of another dtype: fully_shard gathers both as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(7).bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.01 * self.frozen.float().sum())


def mixed_dtypes(rank: int, world: int) -> list[str]:
    """One gather of two dtypes, and parameters that are sharded along dim 1."""

    def losses(ours: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = Model()
        model.blocks = nn.ModuleList(MixedBlock() for _ in range(2))
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.shape[-1] == HIDDEN else None)
        if ours:
            ub_overlap.fsdp.install(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found = []
        for step in range(3):
            loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain, own = losses(False), losses(True)
    return [] if own == plain else [f"{own} {plain}"]


def two_meshes(rank: int, world: int) -> list[str]:
    """Parameters of one module on two meshes are two groups of parameters. A group of each mesh is served."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = init_device_mesh("cpu", (world,))
    outer, inner = FSDPMeshInfo(whole, shard_mesh_dim=0), FSDPMeshInfo(mesh["inner"], shard_mesh_dim=0)

    def losses(ours: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model: Any = Model()
        for block in model.blocks:
            inside = id(block.up.weight)
            fully_shard(
                block,
                mesh=whole,
                shard_placement_fn=lambda p, inside=inside: ShardPlacementResult(Shard(0), inner if id(p) == inside else outer),
            )
        fully_shard(model, mesh=whole)
        count = len(ub_overlap.fsdp.install(model)) if ours else 0
        found = []
        for step in range(2):
            loss = loss_of(model, rank, step)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
            found.append(loss.item())
        return found, count

    (plain, _), (own, count) = losses(False), losses(True)
    same = own[0] == plain[0] and abs(own[1] - plain[1]) < 1e-6
    return ([] if same else [f"{own} {plain}"]) + ([] if count == 7 else [f"{count} groups"])


def removal(rank: int, world: int) -> list[str]:
    """`remove` gives torch's collectives back; the model trains on."""
    model = sharded()
    before = [type(comm).__name__ for comm in comms(model)]
    installation = ub_overlap.fsdp.install(model)
    again = attempt(lambda: ub_overlap.fsdp.install(model))
    unsharded = attempt(lambda: ub_overlap.fsdp.install(nn.Linear(2, 2)))
    train(model, rank, steps=1)
    installation.remove()
    installation.remove()
    C.clear_stats()
    train(model, rank, steps=1)
    bad = [] if [type(comm).__name__ for comm in comms(model)] == before and not _used("") else ["not removed"]
    for one, text in ((again, "has ub_overlap's collectives already"), (unsharded, "sharded by fully_shard")):
        if one["error"] != "OptionError" or text not in one["text"]:
            bad.append(f"{text}: {one}")
    return bad


def comms(model: Any) -> list[Any]:
    groups = [group for module in (model, *model.blocks) for group in _fsdp_compat.param_groups(module)]
    return [comm for group in groups for comm in _fsdp_compat.comms(group)]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the warnings of our package."""
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("ub_overlap.runtime.data_parallel")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def no_transport(rank: int, world: int) -> tuple[list[str], list[str]]:
    """On several hosts, in fp64 and with CPU offload torch's collectives stay, which the log says once each."""
    bad = []
    mesh = init_device_mesh("cpu", (world,))
    with reset(), logged() as texts:
        C.testing.set_host_id(f"host{rank}:boot:1")
        model = sharded(mesh=DeviceMesh.from_group(dist.new_group(list(range(world))), "cpu"))
        ub_overlap.fsdp.install(model)
        if train(model, rank)[0] != train(sharded(), rank)[0]:
            bad.append("hosts")
    with logged() as wide:
        model = sharded(mesh=mesh).double()
        ub_overlap.fsdp.install(model)
        train(model, rank)
    with logged() as offloaded:
        model = sharded(mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        if len(ub_overlap.fsdp.install(model)):
            bad.append("offload")
    return bad, [*texts, *wide, *offloaded]


def modules_of_one_group(rank: int, world: int) -> tuple[int, list[str], int]:
    """Return the number of groups that `install` serves, their sites, and the calls of a hook at the first forward.

    fully_shard([a, b]), as torchtitan shards norm and head, makes one group for both.
    """
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    fully_shard([model[1], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    roots: list[Any] = []
    end = _fsdp_compat.at_first_forward(roots.append)
    try:
        for _ in range(2):
            model(torch.zeros(2, 4))
    finally:
        end()
    installation = ub_overlap.fsdp.install(model)
    sites = sorted(_fsdp_compat.comms(group)[0]._site for group, *_ in installation._replaced)
    return len(installation), sites, sum(root is model for root in roots)
