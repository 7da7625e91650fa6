"""Sizes that are computed from other sizes: the same algebra decides, and emits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.graph.emitter import Emitter
from ub_overlap.compiler.graph.size_sources import SizeSources
from ub_overlap.compiler.graph.sizes import as_size
from ub_overlap.compiler.plan.reasons import Reason

Sizes = tuple[torch.SymInt, ...]


def symbolic(*numbers: int) -> tuple[Any, Sizes]:
    """Return a fake mode, and one symbolic size for each number."""
    env = ShapeEnv()
    mode = compat.FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(numbers))
    return mode, tuple(mode.from_tensor(torch.empty(numbers), symbolic_context=context).shape)


def inputs_of(mode: Any, *values: Any) -> Graph:
    """Return a graph with an input for each value: a number, or a shape."""
    graph = Graph()
    for i, value in enumerate(values):
        with mode:
            graph.placeholder(f"x{i}").meta["val"] = torch.empty(value) if isinstance(value, tuple) else value
    return graph


def computed(graph: Graph, size: Any, *inputs: Any) -> int:
    """Return `size` as nodes that are emitted for it compute it from `inputs`."""
    origin = next(n for n in graph.nodes if isinstance(n.meta["val"], Tensor))
    graph.output(Emitter(graph, origin, {}).size(as_size(size)))
    graph.lint()
    return GraphModule(torch.nn.Module(), graph)(*inputs)


def random_size(draw: random.Random, sizes: Any, depth: int) -> Any:
    """Return a number of sizes by integer and float arithmetic, rounding, comparison, powers and operations on bits."""
    if depth == 0:
        return draw.choice([*sizes, draw.randint(1, 9)])
    a, b = (random_size(draw, sizes, depth - 1) for _ in range(2))
    positive = draw.randint(1, 9)
    forms: list[Callable[[], Any]] = [
        lambda: a + b, lambda: a - b, lambda: a * b, lambda: a // positive, lambda: a % positive,
        lambda: torch.sym_max(a, b), lambda: torch.sym_min(a, b), lambda: a * a,
        lambda: math.ceil(a / positive), lambda: math.floor(a / positive), lambda: math.trunc(a / positive),
        lambda: math.ceil(1.25 * a / positive), lambda: round(0.7 * a), lambda: round(a / positive), lambda: abs(a - b),
        lambda: math.floor(torch.sym_float(sizes[0]) ** 0.5), lambda: 2 ** (abs(a) % 5),
        lambda: a & ~7, lambda: a | positive, lambda: a ^ b, lambda: torch.sym_ite(a > b, a + sizes[0], b + sizes[1]),
        lambda: torch.sym_ite(torch.sym_not(a == b), sizes[0], torch.sym_ite(a <= positive, sizes[0] + 1, sizes[1])),
    ]  # fmt: skip
    return draw.choice(forms)()


@pytest.mark.parametrize("seed", range(120))
def test_random_sizes_are_computed(seed: int) -> None:
    draw = random.Random(seed)
    s, t = draw.randint(11, 99), draw.randint(11, 99)
    mode, sizes = symbolic(s, t)
    wanted = random_size(draw, sizes, 3)
    if not isinstance(wanted, torch.SymInt):
        return
    graph = inputs_of(mode, (sizes[0], 4), sizes[1])
    assert computed(graph, wanted, torch.empty(s, 4), t) == random_size(_again(seed), (s, t), 3)


def _again(seed: int) -> random.Random:
    draw = random.Random(seed)
    draw.randint(11, 99), draw.randint(11, 99)
    return draw


def test_symbols_follow_from_sums_and_products() -> None:
    mode, (s, t) = symbolic(12, 20)
    graph = inputs_of(mode, (s - 1, 4), (s * t * 3,))
    assert computed(graph, t // 3 + s, torch.empty(11, 4), torch.empty(12 * 20 * 3)) == 20 // 3 + 12


def test_a_size_as_a_whole_is_read() -> None:
    """[B*T] that is viewed again: neither B nor T is known, their product is."""
    mode, (s, t) = symbolic(12, 20)
    graph = inputs_of(mode, (s * t, 4))
    assert computed(graph, s * t + 2, torch.empty(240, 4)) == 242


@pytest.mark.parametrize(
    "size",
    [lambda s, _: s, lambda _, t: t, lambda s, _: s // 2, lambda s, t: s + t],
    ids=["s", "t", "half", "sum"],
)  # fmt: skip
def test_undetermined_sizes(size: Callable[..., Any]) -> None:
    """Lookalikes: a product of two unknowns, and half of a size, which two sizes have."""
    mode, (s, t) = symbolic(12, 20)
    graph = inputs_of(mode, (s * t, 4), (t // 2,))
    inputs = graph.find_nodes(op="placeholder")
    assert SizeSources(inputs).find(as_size(size(s, t))) is None


def test_a_factor_that_may_be_0_determines_nothing() -> None:
    mode, (s, t) = symbolic(12, 20)
    graph = inputs_of(mode, (s * (t // 7),), (t,))
    assert SizeSources(graph.find_nodes(op="placeholder")).find(as_size(s)) is None


def plain(x: Tensor, w: Tensor) -> Tensor:
    return fc.all_reduce(x @ w, "sum", dist.group.WORLD)


def all_but_last(x: Tensor, w: Tensor) -> Tensor:
    return fc.all_reduce(x[:-1] @ w, "sum", dist.group.WORLD)


def half(x: Tensor, w: Tensor) -> Tensor:
    return fc.all_reduce(x[: x.shape[0] // 2] @ w, "sum", dist.group.WORLD)


def at_most(x: Tensor, w: Tensor) -> Tensor:
    return fc.all_reduce(x[: min(x.shape[0], 8)] @ w, "sum", dist.group.WORLD)


def padded(x: Tensor, w: Tensor) -> Tensor:
    """Tokens padded to a multiple of the ranks, as vLLM does."""
    n, ranks = x.shape[0], dist.get_world_size()
    rows = (n + ranks - 1) // ranks * ranks
    return fc.reduce_scatter_tensor(F.pad(x, (0, 0, 0, rows - n)) @ w, "sum", 0, dist.group.WORLD)


def gathered_but_last(x: Tensor, w: Tensor) -> Tensor:
    return fc.all_gather_tensor(x[:-1], 0, dist.group.WORLD) @ w


def in_pairs(x: Tensor, w: Tensor) -> Tensor:
    """Tokens [n] viewed as [n // 2, 2]."""
    hidden = x[: x.shape[0] // 2 * 2].view(-1, 2, x.shape[1])
    return fc.all_reduce(hidden @ w, "sum", dist.group.WORLD)


def up_to_capacity(x: Tensor, w: Tensor) -> Tensor:
    """An expert takes a quarter more than its even share of the tokens, an even number of them."""
    capacity = math.ceil(1.25 * x.shape[0] / 4)
    return fc.all_reduce(x[: capacity & ~1] @ w, "sum", dist.group.WORLD)


FORMS = (plain, all_but_last, half, at_most, padded, gathered_but_last, in_pairs, up_to_capacity)


def compiled(_rank: int, _world: int, *names: str) -> dict[str, list[tuple[str, str, str]]]:
    """Compile forms for any number of tokens, compare three sizes, forward and backward, and return what is decided: phases,
    strategies, reasons."""
    from ub_overlap.compiler.reports.history import HISTORY

    found = {}
    forms = {f.__name__: f for f in FORMS}
    for name in names:
        torch.compiler.reset()
        mark = HISTORY.mark()
        function = torch.compile(
            forms[name], backend="ub_overlap", dynamic=True, options={"overlap": "force", "inner": "aot_eager"}
        )
        for tokens in (7, 10, 32):
            x, w = torch.randn(tokens, 16, requires_grad=True), torch.randn(16, 16)
            ours, eager = function(x, w), forms[name](x, w)
            (ours_grad,), (grad,) = (torch.autograd.grad(y.square().sum(), x) for y in (ours, eager))
            if dist.get_backend() != "fake":
                torch.testing.assert_close(ours, eager)
                torch.testing.assert_close(ours_grad, grad, rtol=1e-5, atol=1e-4)
        found[name] = [(d.phase, str(d.strategy), d.reason) for plan in HISTORY.since(mark) for d in plan.decisions]
    return found


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.tier("test")
def test_sites_of_computed_sizes(fake2: FakeRanks, form: Callable[..., Any]) -> None:
    decided = fake2.run(compiled, form.__name__)[0][form.__name__]
    assert [strategy for phase, strategy, _ in decided if phase == "forward"] == ["pipelined"]
    assert Reason.DYNAMIC_SHAPE not in {reason for *_, reason in decided}


def test_numbers_of_computed_sizes(pool2: RankPool) -> None:
    pool2.run(compiled, "padded", "up_to_capacity")
