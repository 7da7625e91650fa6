"""Uses of a compiled model: inference, dynamic sizes, graph breaks, several groups, training loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ub_overlap
from tests.compiler.rank_compile import FORCE, build, since, world_name
from tests.harness.later_steps import compiled_before
from tests.harness.ranks import RankPool
from tests.harness.traces import as_loss
from tests.models.compare import error, uncached
from tests.models.dtensor_llama import tensor_mesh
from tests.models.megatron import MLP, Mappings
from ub_overlap.compiler.reports.history import HISTORY

MEGATRON = "tests.models.megatron"
Answer = tuple[float, list[str]]
"""(largest error of any value against eager, decisions as "phase kind strategy")."""


def decided(mark: int) -> list[str]:
    return [f"{d.phase} {d.kind.value} {d.strategy}" for p in HISTORY.since(mark) for d in p.decisions]


FORWARD = ["forward all_gather_matmul pipelined", "forward matmul_reduce_scatter pipelined"]
BACKWARD = ["backward all_gather_matmul pipelined", "backward matmul_reduce_scatter pipelined"]


def compiled(module: Any, **kwargs: Any) -> Any:
    return torch.compile(module, backend="ub_overlap", options=FORCE, **kwargs)


def mlp(world: int, group: str = "", seed: int = 5, cls: Callable[..., nn.Module] = MLP) -> nn.Module:
    torch.manual_seed(seed + dist.get_rank())
    return cls(64, 96 // world, Mappings("functional", 0, group or world_name()), True, False)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + dist.get_rank()))


def grads(module: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    return [t.grad for t in (*inputs, *module.parameters())]


def worst(ours: list[Any], eager: list[Any]) -> float:
    return max(error(a, b, "value") for a, b in zip(ours, eager, strict=True))


def train_once(rank: int, world: int, make: Callable[[int], nn.Module], *shape: int) -> Answer:
    """Run one forward and backward of make(world), eager and compiled."""
    eager, ours = make(world), make(world)
    x, y = noise(*shape).requires_grad_(), noise(*shape).requires_grad_()
    a = eager(x)
    as_loss(a).backward()
    mark = HISTORY.mark()
    b = compiled(ours)(y)
    as_loss(b).backward()
    return worst([b, *grads(ours, y)], [a, *grads(eager, x)]), decided(mark)


def inference(rank: int, world: int, name: str) -> Answer:
    case = build(rank, world, MEGATRON, {"gated": True})
    mark = HISTORY.mark()
    with getattr(torch, name)():
        difference = worst([compiled(case.module)(*case.inputs)], [case.module(*case.inputs)])
    return difference, decided(mark)


def sizes(rank: int, world: int) -> Answer:
    """Run four sizes with one forward and one backward graph."""
    module, difference, mark = mlp(world), 0.0, HISTORY.mark()
    function = compiled(module, dynamic=True)
    for rows in (6, 8, 14, 40):
        x = noise(rows, 2, 64).requires_grad_()
        difference = max(difference, worst([function(x)], [module(x)]))
        as_loss(function(x)).backward()
    assert HISTORY.mark() - mark == 2, "compiled again"
    return difference, decided(mark)


class Broken(nn.Module):
    """Two parallel MLPs with a graph break between them."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.first, self.second = mlp(world), mlp(world, seed=9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Regions(nn.Module):
    """Compile each layer separately, as torchtitan does."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(compiled(mlp(world, seed=s)) for s in (5, 9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class TwoGroups(nn.Module):
    """Tensor parallelism over {0, 2} and {1, 3}, then over all four ranks."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.rows, self.all = mlp(2, tensor_mesh(world, True).get_group().group_name), mlp(world, seed=9)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.rows(x))


class Counting(nn.Module):
    """A step counter and a running mean that every forward updates."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.inner = mlp(world)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        y = self.inner(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
        return y + self.mean


def broken(rank: int, world: int) -> Answer:
    return train_once(rank, world, Broken, 8, 2, 64)


def regions(rank: int, world: int) -> Answer:
    """Compare with the same layers uncompiled."""
    ours, plain = Regions(world), [mlp(world, seed=s) for s in (5, 9)]
    x = noise(8, 2, 64)
    mark = HISTORY.mark()
    got, expected = ours(x), x
    for layer in plain:
        expected = expected + layer(expected)
    as_loss(got).backward()
    return worst([got], [expected]), decided(mark)


def two_groups(rank: int, world: int) -> Answer:
    return train_once(rank, world, TwoGroups, 8, 2, 64)


def training(rank: int, world: int) -> Answer:
    """Run five steps of AdamW and compare losses and weights with eager."""
    eager, ours = mlp(world), mlp(world)
    function, mark = compiled(ours), HISTORY.mark()
    losses: list[list[Tensor]] = [[], []]
    for run, module, into in ((eager, eager, losses[0]), (function, ours, losses[1])):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for step in range(5):
            with compiled_before(step):
                loss = run(noise(8, 2, 64, seed=step)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            into.append(loss.detach())
    moved = worst(list(ours.parameters()), list(mlp(world).parameters()))
    assert moved > 1e-3, "nothing was trained"
    return worst([*losses[1], *ours.parameters()], [*losses[0], *eager.parameters()]), decided(mark)


def buffers(rank: int, world: int) -> Answer:
    eager, ours = Counting(world), Counting(world)
    function, mark = compiled(ours), HISTORY.mark()
    for step in range(3):
        x = noise(8, 2, 64, seed=step)
        difference = worst([function(x)], [eager(x)])
    assert ours.steps.item() == 3
    return max(difference, worst([ours.mean], [eager.mean])), decided(mark)


def autocast(rank: int, world: int) -> Answer:
    """Run bf16 matmuls of fp32 weights; the error is bf16's."""
    eager, ours = mlp(world), mlp(world)
    x, mark = noise(8, 2, 64), HISTORY.mark()
    with torch.autocast("cpu", torch.bfloat16):
        a, b = eager(x), compiled(ours)(x)
    assert a.dtype == b.dtype == torch.bfloat16
    as_loss(a).backward()
    as_loss(b).backward()
    return worst([b, *grads(ours)], [a, *grads(eager)]) / 1e4, decided(mark)


def constant_input(rank: int, world: int) -> Answer:
    """An input without gradient: backward has no reduce_scatter."""
    eager, ours = mlp(world), mlp(world)
    x, mark = noise(8, 2, 64), HISTORY.mark()
    as_loss(eager(x)).backward()
    as_loss(compiled(ours)(x)).backward()
    return worst(grads(ours), grads(eager)), decided(mark)


def called_twice(rank: int, world: int) -> Answer:
    """Run two forwards before one backward; neither overwrites the other's saved tensors."""
    eager, ours = mlp(world), mlp(world)
    function, mark = compiled(ours), HISTORY.mark()
    for run in (eager, function):
        as_loss([run(noise(8, 2, 64, seed=1)), run(noise(8, 2, 64, seed=2))]).backward()
    return worst(grads(ours), grads(eager)), decided(mark)


def without_caches(rank: int, world: int, name: str, *args: Any) -> Answer:
    with uncached():
        return globals()[name](rank, world, *args)


def check(pool: RankPool, expected: list[str], name: str, *args: Any) -> None:
    for difference, decisions in pool.run(without_caches, name, *args):
        assert difference < 1e-5
        assert sorted(decisions) == sorted(expected)


def passes_alone(rank: int, world: int) -> Answer:
    """Train one step with Inductor's own backend and our passes, and again with another model and the same passes."""
    options = ub_overlap.passes({"overlap": "force"})
    difference, mark = 0.0, HISTORY.mark()
    for seed in (5, 9):
        eager, ours = mlp(world, seed=seed), mlp(world, seed=seed)
        x, y = noise(8, 2, 64).requires_grad_(), noise(8, 2, 64).requires_grad_()
        a, b = eager(x), torch.compile(ours, options=options)(y)
        as_loss(a).backward()
        as_loss(b).backward()
        difference = max(difference, worst([b, *grads(ours, y)], [a, *grads(eager, x)]))
    return difference, decided(mark)


def test_passes_alone(pool2: RankPool) -> None:
    """ub_overlap.passes() with backend="inductor" overlaps the same sites as backend="ub_overlap"."""
    for difference, decisions in pool2.run(without_caches, "passes_alone"):
        assert difference < 1e-5
        assert set(decisions) == set(FORWARD + BACKWARD)


def passes_with_fp8(rank: int, world: int) -> Answer:
    """Cast weights in every call: the passes do not know which inputs are parameters."""
    torch.manual_seed(5)
    ours = mlp(world).bfloat16()
    with torch.no_grad():
        x = noise(32, 2, 64).bfloat16()
        plain = ours(x)
        mark = HISTORY.mark()
        y = torch.compile(ours, options=ub_overlap.passes({"overlap": "force", "fp8": "forward"}))(x)
    assert any(c.recipe for p in HISTORY.since(mark) for c in p.casts)
    return float((y - plain).float().norm() / plain.float().norm()), decided(mark)


def test_passes_with_fp8(pool2: RankPool) -> None:
    for difference, decisions in pool2.run(without_caches, "passes_with_fp8"):
        assert difference < 0.2
        assert set(decisions) >= set(FORWARD)


INFERENCE_MODE = since((2, 12), "functional collectives have no kernel under inference_mode")


@pytest.mark.parametrize("name", ["no_grad", pytest.param("inference_mode", marks=INFERENCE_MODE)])
def test_inference(pool2: RankPool, name: str) -> None:
    check(pool2, FORWARD, "inference", name)


def test_dynamic_sizes_share_one_graph(pool2: RankPool) -> None:
    check(pool2, FORWARD + BACKWARD, "sizes")


@pytest.mark.parametrize("name", ["broken", "regions"])
def test_several_graphs(pool2: RankPool, name: str) -> None:
    """Equal graphs have one plan, so both layers may share decisions."""
    for difference, decisions in pool2.run(without_caches, name):
        assert difference < 1e-5
        assert set(FORWARD + BACKWARD) >= set(decisions) >= set(FORWARD)


def test_two_groups(pool4: RankPool) -> None:
    check(pool4, 2 * (FORWARD + BACKWARD), "two_groups")


@pytest.mark.parametrize("name", ["training", "called_twice"])
def test_training(pool2: RankPool, name: str) -> None:
    expected = FORWARD + BACKWARD[:1]
    check(pool2, expected, name)


def test_buffers(pool2: RankPool) -> None:
    check(pool2, FORWARD, "buffers")


def test_autocast(pool2: RankPool) -> None:
    check(pool2, FORWARD + BACKWARD[:1], "autocast")


def test_input_without_gradient(pool2: RankPool) -> None:
    check(pool2, FORWARD + BACKWARD[:1], "constant_input")
