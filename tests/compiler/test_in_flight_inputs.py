"""Compiled blocks after eager code whose results are in flight when the blocks are called.

torch's own backends leave what the results come from without a gradient, or fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tests.compiler.rank_in_flight_inputs import gradients
from tests.harness.fake_ranks import FakeRanks
from tests.harness.later_steps import compiled_before
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from ub_overlap import _torch_compat as compat

Run = Callable[[Tensor], Tensor]
STEPS = 4
INNER = ["aot_eager", pytest.param("inductor", marks=pytest.mark.tier("test"))]


class Launch(torch.autograd.Function):
    """The copy of a tensor as a collective that is in flight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return compat.InFlightTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def launch(x: Tensor) -> Tensor:
    return Launch.apply(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() + self.linear(x).relu()


def one(x: Tensor, block: Run) -> Tensor:
    return block(launch(x * 2))


def leaf(x: Tensor, block: Run) -> Tensor:
    value = launch(x.detach()).requires_grad_()
    block(value).sum().backward()
    assert value.grad is not None
    return value.grad.detach() + block(value)


def in_several_blocks(x: Tensor, block: Run) -> Tensor:
    value = launch(x * 2)
    return block(value) + block(value).sin() + value


def in_dtensor(x: Tensor, block: Run) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    y = block(DTensor.from_local(launch(x * 2), mesh, [Shard(0)], run_check=False))
    return y.to_local()  # type: ignore[attr-defined]


def checkpointed(x: Tensor, block: Run) -> Tensor:
    return checkpoint(block, launch(x * 2), use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed_reentrant(x: Tensor, block: Run) -> Tensor:
    return checkpoint(block, launch(x * 2), use_reentrant=True)  # type: ignore[no-any-return]


def without_gradients(x: Tensor, block: Run) -> Tensor:
    with torch.no_grad():
        return x + block(launch(x * 2))


def in_inference(x: Tensor, block: Run) -> Tensor:
    with torch.inference_mode():
        return block(launch(x * 2)).clone()


FORMS = [
    one,
    leaf,
    in_several_blocks,
    in_dtensor,
    checkpointed,
    checkpointed_reentrant,
    without_gradients,
    in_inference,
]


@pytest.fixture
def group() -> Iterator[None]:
    with FakeRanks(2).group():
        yield


class Linear(nn.Module):
    """A block without a bias and a mean, for DTensors."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 3).relu()


def train(form: Callable[[Tensor, Run], Tensor], module: nn.Module, sizes: list[int], inner: str | None) -> list[Tensor]:
    """Return outputs and gradients of each step; nothing is compiled after the second. inner None: eager."""
    block = module
    if inner is not None:
        block = torch.compile(module, backend="ub_overlap", fullgraph=True, options={"inner": inner})  # type: ignore[assignment]
    results = []
    for step, size in enumerate(sizes):
        x = torch.randn(size, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        module.zero_grad()
        with compiled_before(step):
            y = form(x, block)
            if y.requires_grad:
                y.square().sum().backward()
        gradients = [g for g in (x.grad, *(p.grad for p in module.parameters())) if g is not None]
        results += [y.detach().clone(), *(g.clone() for g in gradients)]
    return results


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_compiled_once_with_eager_gradients(group: None, form: Callable[[Tensor, Run], Tensor], inner: str) -> None:
    torch.manual_seed(0)
    module = Linear() if form is in_dtensor else Block()
    eager, ours = (train(form, module, [4] * STEPS, which) for which in (None, inner))
    assert len(eager) == len(ours)
    for expected, result in zip(eager, ours, strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("form", [one, in_dtensor], ids=lambda form: form.__name__)
def test_dynamic_sizes(group: None, form: Callable[[Tensor, Run], Tensor], inner: str) -> None:
    """The second size makes Dynamo compile for any size; later ones find that graph."""
    torch.manual_seed(0)
    module = Linear() if form is in_dtensor else Block()
    eager, ours = (train(form, module, [4, 6, 10, 14], which) for which in (None, inner))
    for expected, result in zip(eager, ours, strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("inner", INNER)
def test_written_in_place(group: None, inner: str) -> None:
    """What eager code reads later has the values and the history of the write."""

    def write(x: Tensor) -> Tensor:
        return x.mul_(3).sin()

    def form(x: Tensor, block: Run) -> Tensor:
        value = launch(x * 2)
        return block(value) + value.cos()

    module = nn.Identity()
    module.forward = write  # type: ignore[method-assign, assignment]
    eager, ours = (train(form, module, [4] * STEPS, which) for which in (None, inner))
    for expected, result in zip(eager, ours, strict=True):
        torch.testing.assert_close(result, expected)


def test_inputs_are_not_changed(group: None) -> None:
    block = torch.compile(Block(), backend="ub_overlap", options={"inner": "aot_eager"})
    value = launch(torch.randn(4, 16, requires_grad=True))
    history = value.grad_fn
    for _ in range(2):
        block(value).sum().backward(retain_graph=True)
        elem = value.elem  # type: ignore[attr-defined]
        assert (elem.requires_grad, elem.grad_fn, elem._version) == (False, None, 0)
        assert (value.grad_fn, value._version) == (history, 0)
        assert value.completed  # type: ignore[attr-defined]


@pytest.mark.parametrize(("inner", "local"), [("aot_eager", True), in_full(("aot_eager", False)), in_full(("inductor", True))])
def test_blocks_after_a_sharded_embedding(pool4: RankPool, inner: str, local: bool) -> None:
    """local=False: DTensors whose local tensor is in flight."""
    for worst, norm, was_in_flight, strategies in pool4.run(gradients, inner, local):
        assert was_in_flight and norm > 0.001
        assert worst < 1e-5
        assert "pipelined" in strategies, strategies
