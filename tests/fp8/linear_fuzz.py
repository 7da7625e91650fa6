"""Random programs of linears next to collectives, compiled in float8 under Inductor on each rank.

Inputs and weights are -1, 0 or 1, so that a cast to float8 loses nothing: a program of one linear must give the numbers of
its 16-bit form. A second linear casts larger sums, which are rounded.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch.utils.checkpoint import checkpoint

from tests.compiler.rank_compile import world_name
from tests.models.compare import error, uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.reports.history import HISTORY

SIZES = (32, 48, 64, 96, 128)
EXACT, ROUNDED = 0.01, 0.2
"""Allowed differences relative to the largest value: of one linear, and of two."""

Form = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _addmm(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = torch.mm(rows, w) if b is None else torch.addmm(b, rows, w)
    return y.view(*x.shape[:-1], w.shape[1])


def _plus(y: Tensor, b: Tensor | None) -> Tensor:
    return y if b is None else y + b


STORED_KN: dict[str, Form] = {
    "addmm": _addmm,
    "matmul": lambda x, w, b: _plus(x @ w, b),
    "einsum kn": lambda x, w, b: _plus(torch.einsum("...k,kn->...n", x, w), b),
    "linear of the transpose": lambda x, w, b: F.linear(x, w.t(), b),
    "linear of a transposed copy": lambda x, w, b: F.linear(x, w.t().contiguous(), b),
}
STORED_NK: dict[str, Form] = {
    "linear": F.linear,
    "matmul of the transpose": lambda x, w, b: _plus(x @ w.t(), b),
    "addmm of the transpose": lambda x, w, b: _addmm(x, w.t(), b),
    "einsum nk": lambda x, w, b: _plus(torch.einsum("...k,nk->...n", x, w), b),
    "transposed product": lambda x, w, b: _plus((w @ x.reshape(-1, x.shape[-1]).t()).t().reshape(*x.shape[:-1], -1), b),
}


class Program(nn.Module):
    """One or two linears after a gather or none, before a reduction or none. The same seed draws the same program."""

    def __init__(self, seed: int, rank: int, world: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.values = torch.Generator().manual_seed(1000 * seed + rank)
        self.dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16])
        self.before = draw.choice(["none", "gather"])
        self.after = draw.choice(["none", "reduce_scatter", "reduce_scatter", "reduce_scatter", "all_reduce"])
        self.linears = draw.choice([1, 1, 2])
        self.dim = draw.choice([0, 1])
        shape = draw.choice([(64,), (64,), (2, 32), (4, 32), (1, 64), (40,)])
        inner, cols, last = (draw.choice(SIZES) for _ in range(3))
        self.forms, self.biases, self.weights = [], nn.ParameterList(), nn.ParameterList()
        self.tied = self.linears == 2 and draw.random() < 0.3
        for k, n in ((inner, cols), (cols, inner if self.tied else last))[: self.linears]:
            stored = draw.choice([STORED_KN, STORED_KN, STORED_NK])
            if self.tied and self.weights:
                stored = STORED_NK if self.forms[0][0] in STORED_KN else STORED_KN
            self.forms.append(draw.choice(list(stored.items())))
            if not (self.tied and self.weights):
                self.weights.append(self._parameter((k, n) if stored is STORED_KN else (n, k)))
            self.biases.append(self._parameter((n,)))
        self.has_bias = [draw.random() < 0.5 for _ in self.forms]
        self.addition = draw.choice(["none", "none", "full", "row", "scale", "two"])
        self.readers = draw.choice(["none", "none", "sum", "matmul", "product"])
        self.is_checkpointed = draw.random() < 0.3
        self.is_dynamic = draw.random() < 0.15
        width = self._width(len(self.forms))
        self.full, self.row, self.other = (
            self._parameter((self._rows(shape, world), width)), self._parameter((width,)), self._parameter((inner, 32)),
        )  # fmt: skip
        recipe = draw.choice(["tensorwise", "tensorwise", "rowwise", "delayed"])
        if recipe == "rowwise" and not compat.cpu_scales_rows():
            recipe = "tensorwise"
        self.options = {
            "overlap": draw.choice(["force", "force", "force", "off"]),
            "fp8": {
                "products": draw.choice(["all", "all", "forward"]),
                "recipe": recipe,
                "weights": draw.choice(["cached", "per_call"]),
                "state": f"fuzz {seed}",
            },
        }
        self.x = self._parameter((*shape, inner))

    def text(self) -> str:
        parts = [
            f"{tuple(self.x.shape)} {str(self.dtype)[6:]}", self.before, f"dim {self.dim}",
            *(f"{name}{' + bias' if b else ''}" for (name, _), b in zip(self.forms, self.has_bias, strict=True)),
            *(["tied"] if self.tied else []), f"add {self.addition}", f"readers {self.readers}", self.after,
            *(["checkpoint"] if self.is_checkpointed else []), *(["dynamic"] if self.is_dynamic else []),
            f"weights {[tuple(w.shape) for w in self.weights]}", str(self.options),
        ]  # fmt: skip
        return ", ".join(parts)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.is_checkpointed:
            return checkpoint(self._run, x, use_reentrant=False)  # type: ignore[return-value]
        return self._run(x)

    def _run(self, x: Tensor) -> tuple[Tensor, ...]:
        dim = min(self.dim, x.dim() - 2) if x.shape[0] > 1 else x.dim() - 2
        if self.before == "gather":
            x = funcol.all_gather_tensor_autograd(x, dim, world_name())
        y = x
        for i, (_, form) in enumerate(self.forms):
            if i:
                y = F.relu(y - 0.5)  # sums are integers: none is where relu has its kink
            y = form(y, self.weights[0 if self.tied else i], self.biases[i] if self.has_bias[i] else None)
        y = self._add(x, y)
        if self.after == "reduce_scatter":
            y = funcol.reduce_scatter_tensor_autograd(y, "sum", dim, world_name())
        elif self.after == "all_reduce":
            y = funcol.all_reduce(y, "sum", world_name())
        return (y, *self._read(x))

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        if self.addition == "full":
            return y + self.full.view(y.shape)
        if self.addition == "row":
            return y + self.row
        if self.addition == "scale":
            return y * 0.5
        if self.addition == "two" and len(self.forms) == 1:
            form = self.forms[0][1]
            return y + form(x, self.weights[0], None)
        return y

    def _read(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.readers == "sum":
            return (x.sum(0),)
        if self.readers == "matmul":
            return (x @ self.other,)
        return (x * 2.0,) if self.readers == "product" else ()

    def _parameter(self, shape: tuple[int, ...]) -> nn.Parameter:
        value = torch.randint(-1, 2, shape, generator=self.values)
        return nn.Parameter(value.to(self.dtype))

    def _width(self, linears: int) -> int:
        name, _ = self.forms[linears - 1]
        w = self.weights[0 if self.tied else linears - 1]
        return w.shape[1] if name in STORED_KN else w.shape[0]

    def _rows(self, shape: tuple[int, ...], world: int) -> int:
        return torch.Size(shape).numel() * (world if self.before == "gather" else 1)


def numbers(program: Program, run: Any) -> dict[str, Tensor | None]:
    """Return the outputs and gradients of `run`."""
    program.zero_grad()
    outputs = run(program.x)
    signs = [torch.arange(o.numel()).view(o.shape) % 3 - 1.0 for o in outputs]
    sum((o.float() * s).sum() for o, s in zip(outputs, signs, strict=True)).backward()
    found = {f"output{i}": o.detach() for i, o in enumerate(outputs)}
    return found | {f"{n}.grad": None if p.grad is None else p.grad.clone() for n, p in program.named_parameters()}


def fuzz(rank: int, world: int, seeds: list[int], has_kernels: bool = True) -> tuple[list[str], dict[str, int]]:
    """Return what failed, by seed, and how often each kind of decision was made.

    Without kernels every C++ kernel of Inductor does nothing, which saves most of the time. Numbers are not compared then.
    """
    wrong: list[str] = []
    seen: Counter[str] = Counter()
    with contextlib.nullcontext() if has_kernels else patch.object(AsyncCompile, "cpp_pybinding", _compile_nothing):
        for seed in seeds:
            program = Program(seed, rank, world)
            wrong += [f"seed {seed}: {text}\n  {program.text()}" for text in _run(program, seen, has_kernels)]
    return wrong, dict(seen)


def _compile_nothing(self: AsyncCompile, argtypes: list[str], source_code: str) -> Callable[..., None]:
    return lambda *args: None


def _run(program: Program, seen: Counter[str], has_numbers: bool) -> list[str]:
    """Compile and run `program`. Return what is wrong."""
    truth = numbers(program, program)
    torch._dynamo.reset()
    mark = HISTORY.mark()
    try:
        with uncached(), recorded_layouts(seen) as layouts:
            compiled = torch.compile(program, backend="ub_overlap", dynamic=program.is_dynamic, options=program.options)
            found = numbers(program, compiled)
    except Exception as e:  # noqa: BLE001 (every error is a result)
        return [f"{type(e).__name__}: {_shortened(str(e))}"]
    plans = HISTORY.since(mark)
    seen.update(f"cast {c.role} {c.recipe or c.reason}" for p in plans for c in p.casts)
    seen.update(f"site {d.kind.value} {str(d.strategy).partition(':')[0]}" for p in plans for d in p.decisions)
    limit = EXACT if len(program.forms) == 1 else ROUNDED
    bad = {n: e for n in truth if has_numbers and not (e := error(found[n], truth[n], n)) <= limit}
    return ([f"values differ: {bad}"] if bad else []) + ([f"layouts {layouts}"] if layouts else [])


@contextlib.contextmanager
def recorded_layouts(seen: Counter[str]) -> Iterator[list[Any]]:
    """Record the strides of operands that a GPU does not multiply. The CPU multiplies any; our own ops refuse them.

    `seen` counts the calls, so that a test sees if Inductor calls another function.
    """
    kernels = compat.__getattr__("extern_kernels")
    plain = kernels._scaled_mm
    wrong: list[Any] = []

    def recorded(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen["call of _scaled_mm"] += 1
        if a.stride(1) != 1 or b.stride(0) != 1:
            wrong.append((tuple(a.shape), a.stride(), tuple(b.shape), b.stride()))
        return plain(a, b, *args, **kwargs)

    with patch.object(kernels, "_scaled_mm", recorded):
        yield wrong


def _shortened(text: str) -> str:
    """Return the first lines of an error, without Inductor's dump of the graph."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[6:] if "error:" in line]
    return "\n    ".join(lines[:6] + errors[:6])
