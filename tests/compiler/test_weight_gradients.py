"""Tests of deferred weight gradients: equal to plain ones, computed on request, and refused where they cannot be deferred."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ub_overlap
from tests.harness.tiers import INNER
from ub_overlap.runtime.deferred_gradients import DeferredGradients, ParameterHooks, collect
from ub_overlap.runtime.errors import OptionError

pytestmark = pytest.mark.tier("test")

WIDTH = 16


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Broken(nn.Module):
    """A weight that two graphs read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(x)


class Matmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@contextmanager
def matmuls() -> Iterator[Callable[[], int]]:
    with Matmuls() as mode:
        yield lambda: mode.count


def compiled(module: nn.Module, inner: str = "aot_eager", defer: bool = True) -> nn.Module:
    module.compile(backend="ub_overlap", options={"inner": inner, "defer_weight_gradients": defer})
    return module


def pair(make: Callable[[], nn.Module], inner: str = "aot_eager") -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    plain = make().double()
    return plain, compiled(copy.deepcopy(plain), inner), torch.randn(3, 5, WIDTH, dtype=torch.float64)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("inner", INNER)
def test_two_microbatches_in_flight(inner: str) -> None:
    """Nothing is accumulated before run(), everything after, and the gradient of the input is there at once."""
    plain, deferring, x = pair(lambda: nn.Sequential(Mlp(), Mlp()), inner)
    hooks, pending = ParameterHooks(), []
    for scale in (1.0, 2.0):
        ours, theirs = ((x * scale).requires_grad_() for _ in range(2))
        plain(ours).square().sum().backward()
        loss = deferring(theirs).square().sum()
        with collect(hooks, deferring.parameters()) as collected:
            loss.backward()
        torch.testing.assert_close(theirs.grad, ours.grad)
        pending.append(collected)
    assert all(pending) and not gradients(deferring)
    for collected in pending:
        collected.run()
        assert not collected, "what has run is forgotten"
    torch.testing.assert_close(gradients(deferring), gradients(plain))


def test_without_a_collector_all_gradients_come_at_once() -> None:
    plain, deferring, x = pair(Mlp)
    hooks = ParameterHooks()
    hooks.install(deferring.parameters())
    for module in (plain, deferring):
        module(x.clone().requires_grad_()).square().sum().backward()
    torch.testing.assert_close(gradients(deferring), gradients(plain))


@pytest.mark.parametrize(("input_has_gradient", "first", "second"), [(True, 2, 2), (False, 0, 4)])
def test_matmuls_of_the_parts(input_has_gradient: bool, first: int, second: int) -> None:
    """Of four matmuls two are of weights. Without a gradient of the input, as in a first stage, all are."""
    _, deferring, x = pair(Mlp)
    loss = deferring(x.requires_grad_(input_has_gradient)).square().sum()
    with matmuls() as count:
        with collect(ParameterHooks(), deferring.parameters()) as collected:
            loss.backward()
        assert count() == first
        collected.run()
        assert count() == first + second


def test_a_hook_behind_the_accumulation_is_refused() -> None:
    """torch calls it after the first part, when there is no gradient."""
    _, deferring, _ = pair(Mlp)
    weight: Any = deferring.up.weight  # type: ignore[union-attr]
    handle = weight.register_post_accumulate_grad_hook(lambda p: None)
    hooks = ParameterHooks()
    with pytest.raises(OptionError, match="post_accumulate"):
        hooks.install(deferring.parameters())
    handle.remove()
    hooks.install(deferring.parameters())


def first_part(deferring: nn.Module, x: Tensor, hooks: ParameterHooks | None = None) -> DeferredGradients:
    loss = deferring(x.clone().requires_grad_()).square().sum()
    with collect(hooks or ParameterHooks(), deferring.parameters()) as collected:
        loss.backward()
    return collected


class Odd(nn.Module):
    """Parameters of no dim and of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(2.0))
        self.none, self.nothing = (nn.Parameter(torch.zeros(0, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.none.sum() + self.nothing.sum()


class Shifted(nn.Module):
    """The gradient of `shift` is a view of a value that the weight's gradient reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(15, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu((x.reshape(15, WIDTH) @ self.weight + self.shift).view(x.shape))


@pytest.mark.parametrize("make", [Odd, Shifted])
@pytest.mark.parametrize("inner", INNER)
def test_the_second_parts_of_several_microbatches_run_last(make: Callable[[], nn.Module], inner: str) -> None:
    """The next microbatch's gradients are accumulated in between, in place."""
    plain, deferring, x = pair(make, inner)
    hooks = ParameterHooks()
    pending = [first_part(deferring, scale * x, hooks) for scale in (1.0, 2.0, 3.0)]
    for collected, scale in zip(pending, (1.0, 2.0, 3.0), strict=True):
        assert collected
        collected.run()
        plain((scale * x).requires_grad_()).square().sum().backward()
    torch.testing.assert_close(gradients(deferring), gradients(plain))


def test_a_weight_of_two_graphs_is_refused() -> None:
    _, deferring, x = pair(Broken)
    loss = deferring(x.requires_grad_()).square().sum()
    with pytest.raises(OptionError, match="reached no parameter"), collect(ParameterHooks(), deferring.parameters()):
        loss.backward()


def test_a_hook_on_the_gradient_is_refused() -> None:
    _, deferring, x = pair(Mlp)
    weight: Any = deferring.up.weight  # type: ignore[union-attr]
    weight.register_hook(lambda gradient: 2 * gradient)
    loss = deferring(x.requires_grad_()).square().sum()
    expected = pytest.raises(OptionError, match="1 gradients that reached no parameter")
    with expected, collect(ParameterHooks(), deferring.parameters()):
        loss.backward()


def test_a_weight_that_the_input_gradient_needs_is_not_deferred() -> None:
    """The gradient of a scale that is also the gradient of an input is computed with it. The other is deferred."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.linear = nn.Parameter(torch.zeros(3, 5, WIDTH)), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.shift)

    plain, deferring, x = pair(Shifted)
    loss = deferring(x.requires_grad_()).square().sum()
    with collect(ParameterHooks(), deferring.parameters()) as collected:
        loss.backward()
    assert len(gradients(deferring)) == 1
    collected.run()
    plain(x.detach().requires_grad_()).square().sum().backward()
    torch.testing.assert_close(gradients(deferring), gradients(plain))


def test_an_option_off_defers_nothing() -> None:
    torch.manual_seed(0)
    module = compiled(Mlp().double(), defer=False)
    loss = module(torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)).sum()
    with collect(ParameterHooks(), module.parameters()) as collected:
        loss.backward()
    assert not collected and len(gradients(module)) == 5


def test_passes_refuse_it() -> None:
    with pytest.raises(OptionError, match="cut a backward graph in two"):
        ub_overlap.passes({"defer_weight_gradients": True})
