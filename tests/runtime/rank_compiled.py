"""Rank functions of test_functional.py that compile the functional API and the documented layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ub_overlap

from .oracle import data
from .rank_functional import C, leaf, off, weighted


def block(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, how: dict[str, Any]) -> Tensor:
    a, b = ub_overlap.all_gather_matmul(x, [w1, w3], gather_dim=1, site="mlp.in", **how)
    return ub_overlap.matmul_reduce_scatter(
        torch.nn.functional.silu(a) * b, w2, scatter_dim=1, strategy=how.get("strategy", "pipelined"), site="mlp.out"
    )


def compiled(rank: int, world: int, backend: str, batch: int) -> list[str]:
    """A hand-written gated MLP, compiled as one graph, equals eager. With `batch` 1 the shards are contiguous."""
    bad, options = [], {"inner": "aot_eager", "overlap": "force"} if backend == "ub_overlap" else None
    for how in ({}, {"save": "shard"}, {"strategy": "none"}):
        inputs = [leaf(batch, 4, 8, seed=rank, dtype=torch.float32, grad=True)]
        inputs += [leaf(a, b, seed=20 + rank, dtype=torch.float32, grad=True) for a, b in ((8, 6), (8, 6), (6, 8))]

        def run(f: Callable[..., Tensor], inputs: list[Tensor] = inputs, how: dict[str, Any] = how) -> list[Tensor]:
            out = f(*inputs, how)
            return [out.detach(), *torch.autograd.grad(weighted([out], rank), inputs)]

        extra: dict[str, Any] = {"options": options} if options else {}
        fast = torch.compile(block, backend=backend, fullgraph=True, **extra)
        before = C.site_stats()
        got, want = run(fast), run(block)
        if "strategy" not in how:
            calls = {s: v["calls"] - before.get(s, {"calls": 0})["calls"] for s, v in C.site_stats().items()}
            bad += [
                f"{how} {s}: {calls[s]} calls"
                for s in ("/mlp.in", "/mlp.out", "/mlp.in.backward", "/mlp.out.backward")
                if calls[s] != 2
            ]
        for name, a, b in zip(["y", "dx", "dw1", "dw3", "dw2"], got, want, strict=True):
            bad += off(f"{backend} {how} {name}", a, b.double(), 8 * world)
        with torch.no_grad():
            bad += off(f"{backend} {how} no_grad", fast(*inputs, how), want[0].double(), 8 * world)
    return bad


def dynamic(rank: int, world: int) -> list[str]:
    """One compilation with dynamic shapes serves any number of tokens."""
    bad, how = [], {"save": "shard"}
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    fast = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    weights = [leaf(a, b, seed=20 + rank, dtype=torch.float32, grad=True) for a, b in ((8, 6), (8, 6), (6, 8))]
    for tokens in (4, 6, 10):
        x = leaf(2, tokens, 8, seed=rank, dtype=torch.float32, grad=True)
        got, want = fast(x, *weights, how), block(x, *weights, how)
        bad += off(f"{tokens} y", got, want.detach().double(), 8 * world)
        grads = [torch.autograd.grad(weighted([y], 1), [x, *weights]) for y in (got, want)]
        bad += [c for a, b in zip(*grads, strict=True) for c in off(f"{tokens} grad", a, b.double(), 8 * world)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    return bad + ([] if graphs <= 2 else [f"{graphs} graphs"])


def named(rank: int, world: int) -> list[str]:
    """The functions compile as one graph with every form of the group argument."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    world_group: Any = dist.group.WORLD
    bad = []
    x, w = leaf(3, 4, seed=rank, dtype=torch.float32, grad=True), leaf(4, 2, seed=7, dtype=torch.float32, grad=True)
    want = torch.cat([data(3, 4, seed=r) for r in range(world)]).double() @ w.detach().double()
    for group in (world_group, world_group.group_name, mesh["tp"], (mesh, "tp"), (mesh, 1), mesh.get_group("tp")):
        torch._dynamo.reset()

        def f(x: Tensor, w: Tensor, group: Any = group) -> Tensor:
            return ub_overlap.all_gather_matmul(x, w, group)

        y = torch.compile(f, backend="aot_eager", fullgraph=True)(x, w)
        y.sum().backward()
        bad += off(str(group), y, want, 4)
    return bad


def documented(rank: int, world: int) -> list[str]:
    """The layer of docs/guide/without_compile.md equals the same layer on one process."""
    text = (Path(__file__).resolve().parents[2] / "docs/guide/without_compile.md").read_text()
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "ub_overlap": ub_overlap}
    exec(text.split("```python\n")[1].split("```")[0], names)
    layer = names["MLP"](init_device_mesh("cpu", (world,)), 8, 4 * world)
    for i, p in enumerate(layer.parameters()):
        p.data = data(*p.shape, seed=10 * rank + i)
    shards = [data(6, 8, seed=r) for r in range(world)]
    x = shards[rank].requires_grad_()
    y = layer(x)
    y.sum().backward()
    whole = torch.cat(shards).detach().double().requires_grad_()
    sides = [[data(*p.shape, seed=10 * r + i).double() for i, p in enumerate(layer.parameters())] for r in range(world)]
    out = sum((torch.nn.functional.silu(whole @ w1) * (whole @ w3)) @ w2 for w1, w3, w2 in sides)
    out.sum().backward()  # type: ignore[union-attr]
    rows = slice(6 * rank, 6 * rank + 6)
    return off("y", y, out[rows].detach(), 40) + off("dx", x.grad, whole.grad[rows], 400)  # type: ignore[index]
