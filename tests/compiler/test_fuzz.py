"""Random op chains between collective and matmul, in both directions, compared with eager.

All values are small integers, so every sum is exact in any order and results must be bit-equal. Dims are drawn from few
values that coincide with the rank count and with each other. Distinct sizes would hide a misread layout.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.compiler.rank_compile import FORCE, world_name
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.reports.history import HISTORY

pytestmark = pytest.mark.tier("full")

SEEDS = {2: 40, 3: 10}
"""Number of chains by number of ranks. Three ranks share two cores."""
Op = tuple[str, Callable[[Tensor], Tensor]]


class Chain:
    """Random source of operations (the same on all ranks) and tensors (of one rank)."""

    def __init__(self, seed: int, rank: int, world: int) -> None:
        self.draw, self.rank, self.world = random.Random(seed), rank, world
        self.values = torch.Generator().manual_seed(100 * seed + rank)
        self.inputs: list[Tensor] = []
        self.text: list[str] = []

    def tensor(self, *shape: int) -> int:
        """Add an input and return its index."""
        self.inputs.append(torch.randint(-1, 2, shape, generator=self.values).float())
        return len(self.inputs) - 1

    def dim(self) -> int:
        return self.draw.choice([1, self.world, self.world, 2 * self.world, 2])

    def step(self, shape: tuple[int, ...]) -> Op:
        """Draw one view, permute, copy or round-trip cast that is valid for `shape`."""
        kind = self.draw.choice(["merge", "split", "one", "permute", "permute", "copy", "cast"])
        at = self.draw.randrange(len(shape))
        if kind == "merge" and at + 1 < len(shape):
            to = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
            return f"reshape{to}", lambda t: t.reshape(to)
        if kind == "split" and len(shape) < 4:
            by = self.draw.choice([d for d in range(1, shape[at] + 1) if shape[at] % d == 0])
            to = (*shape[:at], by, shape[at] // by, *shape[at + 1 :])
            return f"reshape{to}", lambda t: t.reshape(to)
        if kind == "permute":
            dims = self.draw.sample(range(len(shape)), len(shape))
            if self.draw.random() < 0.5:
                return f"permute{dims}", lambda t: t.permute(dims)
            return f"permute{dims}.contiguous", lambda t: t.permute(dims).contiguous()
        if kind == "copy":
            return "clone", lambda t: t.clone(memory_format=torch.contiguous_format)
        if kind == "cast":
            return "half", lambda t: t.half().float()
        return f"unsqueeze({at})", lambda t: t.unsqueeze(at)

    def steps(self, shape: tuple[int, ...], most: int) -> list[Op]:
        ops = []
        for _ in range(self.draw.randint(0, most)):
            name, op = self.step(shape)
            shape = tuple(op(torch.empty(shape, device="meta")).shape)
            ops.append((name, op))
        self.text += [n for n, _ in ops]
        return ops


def after(shape: tuple[int, ...], ops: list[Op]) -> tuple[int, ...]:
    t = torch.empty(shape, device="meta")
    for _, op in ops:
        t = op(t)
    return tuple(t.shape)


def run_ops(value: Tensor, ops: list[Op], seen: list[Tensor]) -> Tensor:
    for _, op in ops:
        value = op(value)
        seen.append(value)
    return value


def gathered(c: Chain) -> Callable[..., Any]:
    """Draw all_gather -> chain -> one or two matmuls, sometimes with another reader of the gathered tensor."""
    shape = tuple(c.dim() for _ in range(c.draw.randint(2, 3)))
    dim = c.draw.randrange(len(shape))
    full = (*shape[:dim], shape[dim] * c.world, *shape[dim + 1 :])
    ops = c.steps(full, 3)
    end = after(full, ops)
    rows, other = torch.Size(end[:-1]).numel(), c.draw.random() < 0.3
    x, w, v = c.tensor(*shape), c.tensor(end[-1], c.dim()), c.tensor(c.dim(), rows)
    sides, eye, bias = c.draw.choice(["right", "left", "both", "self"]), c.draw.randrange(8), c.tensor(c.inputs[w].shape[1])
    c.text.insert(0, f"gather {shape} dim {dim}")
    c.text.append(f"matmul {sides}{', other user' if other else ''}")

    def function(*t: Tensor) -> tuple[Tensor, ...]:
        whole = funcol.all_gather_tensor_autograd(t[x].contiguous(), dim, world_name())
        seen = [whole]
        last = run_ops(whole, ops, seen).reshape(rows, end[-1])
        out = [last @ t[w]] if sides in ("right", "both") else []
        if sides == "self":
            out = [last @ last.t().clone(), torch.addmm(t[bias], last, t[w])]
        if sides in ("left", "both"):
            out.append(t[v] @ last)
        return (*out, seen[eye % len(seen)].reshape(-1) * 2.0) if other else tuple(out)

    return function


def reduced(c: Chain, collective: str) -> Callable[..., Any]:
    """Draw matmul -> chain with summands and scales -> reduce_scatter or all_reduce."""
    m, k, n = c.dim() * c.draw.choice([1, c.world]), c.dim(), c.dim() * c.draw.choice([1, c.world])
    a, b = c.tensor(m, k), c.tensor(k, n)
    first = c.draw.choice(["mm", "row", "column", "transposed", "two", "none"])
    extra = {"mm": (n,), "row": (n,), "column": (m, 1), "transposed": (n, m), "two": (k, n), "none": (1,)}[first]
    e, ops = c.tensor(*extra), c.steps((m, n), 3)
    mid = after((m, n), ops)
    full, more, scale = c.tensor(*mid), c.draw.random() < 0.4, c.draw.choice([None, 2.0, 0.5])
    tail = c.steps(mid, 2)
    end = after(mid, tail)
    live, eye, op = c.draw.random() < 0.3, c.draw.randrange(8), "sum"
    dims = [i for i, d in enumerate(end) if d % c.world == 0]
    dim = c.draw.choice(dims) if dims else None
    c.text.insert(0, f"{first} [{m},{k}]@[{k},{n}]")
    c.text.append(f"{collective} dim {dim}, scale {scale}, add {more}, live {live}")

    def function(*t: Tensor) -> tuple[Tensor, ...]:
        y = t[a] @ t[b]
        if first == "mm":
            y = torch.addmm(t[e], t[a], t[b])
        elif first in ("row", "column"):
            y = y + t[e]
        elif first == "transposed":
            y = y + t[e].t()
        elif first == "two":
            y = y + t[a] @ t[e]
        seen = [y]
        y = run_ops(y, ops, seen)
        if more:
            y = y + t[full]
        if scale is not None:
            y = y * scale
        y = run_ops(y, tail, seen)
        if collective == "all_reduce" or dim is None:
            out = funcol.all_reduce(y, op, world_name())
        else:
            out = funcol.reduce_scatter_tensor_autograd(y.contiguous(), op, dim, world_name())
        return (out, seen[eye % len(seen)].reshape(-1) * 2.0) if live else (out,)

    return function


KINDS: dict[str, Callable[[Chain], Callable[..., Any]]] = {
    "all_gather": gathered,
    "reduce_scatter": lambda c: reduced(c, "reduce_scatter"),
    "all_reduce": lambda c: reduced(c, "all_reduce"),
}


def values(function: Callable[..., Any], inputs: list[Tensor], grad: bool) -> list[Tensor | None]:
    leaves = [t.clone().requires_grad_(grad) for t in inputs]
    with torch.set_grad_enabled(grad):
        outputs = function(*leaves)
        if grad:
            weight = [torch.arange(o.numel()).view(o.shape) % 3 - 1.0 for o in outputs]
            sum((o * w).sum() for o, w in zip(outputs, weight, strict=True)).backward()
    return [*(o.detach() for o in outputs), *(t.grad for t in leaves)]


def differ(a: list[Tensor | None], b: list[Tensor | None]) -> list[int]:
    """Return the indices of values that are not bit-equal."""
    same = [x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True)]
    return [i for i, equal in enumerate(same) if not equal]


def fuzz(
    rank: int, world: int, kind: str, seeds: list[int], options: dict[str, Any] = FORCE
) -> tuple[list[str], dict[str, int]]:
    """Return the failures by seed, and how often each strategy was selected."""
    wrong: list[str] = []
    taken: Counter[str] = Counter()
    for seed in seeds:
        c = Chain(seed, rank, world)
        function = KINDS[kind](c)
        grad = kind != "all_reduce"
        truth = values(function, c.inputs, grad)
        torch._dynamo.reset()
        mark = HISTORY.mark()
        with uncached():
            found = values(torch.compile(function, backend="ub_overlap", options=options), c.inputs, grad)
        decisions = [d for p in HISTORY.since(mark) for d in p.decisions]
        taken.update(f"{d.phase} {d.strategy}" for d in decisions)
        taken["zero-copy"] += sum(d.window is not None and d.window.releases is not None for d in decisions)
        if bad := differ(truth, found):
            wrong.append(f"seed {seed}: values {bad} differ: {' -> '.join(c.text)}")
    return wrong, dict(taken)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_chains(request: pytest.FixtureRequest, ranks: int, kind: str) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    for wrong, taken in pool.run(fuzz, kind, list(range(SEEDS[ranks]))):
        assert not wrong, "\n".join(wrong)
        assert taken["forward pipelined"] >= SEEDS[ranks] // 5, taken


@pytest.mark.parametrize(("inner", "seeds"), [("aot_eager", 10), ("inductor", 3)])
def test_chains_from_landing_memory(pool2: RankPool, inner: str, seeds: int) -> None:
    """Zero-copy gathers whose readers, also later ones and those of views, are random."""
    options = {"overrides": [{"strategy": "split"}], "zero_copy": "auto", "inner": inner}
    for wrong, taken in pool2.run(fuzz, "all_gather", list(range(seeds)), options):
        assert not wrong, "\n".join(wrong)
        assert taken["zero-copy"] >= seeds // 3, taken
