"""Hand-written graphs that gather 16 bits and cast afterwards: casts that may move, and lookalikes that may not.

x [16, 32] bfloat16 of this rank (or [2, 8, 32]); w, v [48, 32] float8, sw, sv [1, 48] scales of their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fp8.rank_fp8 import E4M3, gathered, scaled, scattered
from tests.models.compare import uncached
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.reports.history import HISTORY

Inputs = tuple[Tensor, ...]


def scale_of(x: Tensor, dim: int | list[int], power_of_two: bool = True) -> Tensor:
    """Return the factor of x before its cast, as torchao computes it."""
    scale = (448.0 / x.abs().amax(dim, keepdim=True).double().clamp(min=1e-12)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale


def cast(x: Tensor, scale: Tensor, format: torch.dtype = E4M3) -> Tensor:
    return (x.float() * scale).clamp(-448.0, 448.0).to(format)


def _rows(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Inputs:
    """Two matmuls of the same rows."""
    g = gathered(x)
    s = scale_of(g, -1)
    return scaled(cast(g, s), w.t(), s.reciprocal(), sw), scaled(cast(g, s), v.t(), scale_of(g, -1).reciprocal(), sv)


def _any_scale(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    g = gathered(x)
    s = scale_of(g, -1, power_of_two=False)
    return scaled(cast(g, s), w.t(), s.reciprocal(), sw)


def _dim1(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    g = gathered(x.view(2, -1, 32), 1)
    s = scale_of(g, -1)
    return scaled(cast(g, s).view(-1, 32), w.t(), s.view(-1, 1).reciprocal(), sw)


def _columns(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Inputs:
    """Scales per row for one matmul, per column for another that sums over the rows."""
    g = gathered(x.view(2, 8, 32), 1)
    s, flat = scale_of(g, -1), g.view(-1, 32)
    c = scale_of(flat, 0)
    rows = flat.shape[0]
    dy = cast(w[:, :1].float().expand(48, rows), torch.ones(48, 1, device=x.device)).contiguous()
    y = scaled(cast(g, s).view(-1, 32), w.t(), s.view(-1, 1).reciprocal(), sw)
    return y, scaled(dy, cast(flat, c).t().contiguous().t(), torch.ones(48, 1, device=x.device), c.reciprocal())


def _other_order(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    """Per-row scales in the order of the ranks, for rows in the order of the batch."""
    g = gathered(x.view(2, 8, 32))
    s = scale_of(g, -1).view(2, -1, 1)
    mixed = torch.cat(g.chunk(2), 1)
    return scaled(cast(mixed, s).view(-1, 32), w.t(), s.reshape(-1, 1).reciprocal(), sw)


def _square(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    """Per-row scales for the transposed matrix, which has as many rows."""
    g = gathered(x)
    s = scale_of(g, -1)
    return scaled(cast(g.t(), s).contiguous(), w.t(), s.reciprocal(), sw)


def _two_orders(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    """Cast in the order of the ranks, multiply by scales in the order of the batch."""
    g = gathered(x.view(2, 8, 32))
    s = scale_of(torch.cat(g.chunk(2), 1), -1).view(-1, 1)
    return scaled(cast(g, scale_of(g, -1)).view(-1, 32), w.t(), s.reciprocal(), sw)


def _transposed_columns(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    """Per-column scales for the transposed matrix, which has as many columns."""
    g = gathered(x)
    return scaled(cast(g.t(), scale_of(g, 0)).contiguous(), w.t(), torch.ones(32, 1, device=x.device), sw)


def _in_16_bits(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Inputs:
    g = gathered(x)
    s = scale_of(g, -1)
    return scaled(cast(g, s), w.t(), s.reciprocal(), sw), g.cumsum(0)


def _two_formats(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Inputs:
    g = gathered(x)
    s = scale_of(g, -1)
    wide = cast(g, s, torch.float8_e5m2)
    return scaled(cast(g, s), w.t(), s.reciprocal(), sw), scaled(wide, v.t(), s.reciprocal(), sv)


def _logged(amax: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Inputs]:
    """Per-row casts that could move, and an amax that has other inputs or that no cast needs."""

    def run(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Inputs:
        g = gathered(x)
        s = scale_of(g, -1)
        return scaled(cast(g, s), w.t(), s.reciprocal(), sw), amax(g, sv)

    return run


def _mask(g: Tensor, sv: Tensor) -> Tensor:
    """A mask by row number: it differs between shards."""
    return (g * torch.arange(g.shape[0], device=g.device)[:, None]).abs().amax()


def _wide(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    """A scale per tensor from a float64 amax, which float32 does not represent."""
    g = gathered(x)
    s = (448.0 / (g.double() * 1.1).abs().amax()).float()
    return scaled(cast(g, s), w.t(), s.reciprocal(), torch.ones((), device=x.device))


def _scaled_after(power_of_two: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
        """Matmuls whose results are scaled, summed and scattered."""
        one, total = torch.ones((), device=x.device), []
        for y, b in ((x, w), (x * 3, v)):
            s, c = scale_of(y, -1, power_of_two), scale_of(b.float(), -1, power_of_two).t()
            product = scaled(cast(y, s), cast(b.float().t(), c), one, one)
            product *= s.reciprocal() * c.reciprocal()
            total.append(product)
        return scattered(total[0] + total[1])

    return run


GRAPHS: dict[str, Callable[..., Any]] = {
    "rows": _rows, "any_scale": _any_scale, "dim1": _dim1, "columns": _columns, "other_order": _other_order, "square": _square,
    "two_orders": _two_orders, "transposed_columns": _transposed_columns,
    "logged": _logged(lambda g, sv: (g * sv[0, 0]).abs().max()),
    "smooth": _logged(lambda g, sv: (g / sv[:, :32]).abs().amax(0, keepdim=True)),
    "mask": _logged(_mask), "watched": _logged(lambda g, sv: g.abs().max()), "wide": _wide,
    "in_16_bits": _in_16_bits, "two_formats": _two_formats,
    "scaled_after": _scaled_after(True), "scaled_after_any": _scaled_after(False),
}  # fmt: skip


def operands(rank: int, device: torch.device | str = "cpu") -> Inputs:
    shared, own = torch.Generator().manual_seed(3), torch.Generator().manual_seed(5 + rank)
    x = torch.randn(16, 32, generator=own) * torch.logspace(-3, 3, 16)[:, None] * (1 + 7 * rank)
    w, v = (torch.randn(48, 32, generator=shared).to(E4M3) for _ in range(2))
    sw, sv = (torch.rand(1, 48, generator=shared) + 0.5 for _ in range(2))
    return tuple(t.to(device) for t in (x.bfloat16(), w, sw, v, sv))


def graph(name: str, inputs: Inputs, dynamic: bool | None = None) -> tuple[bool, float, list[Decision]]:
    """Return (bitwise equality with eager without overlap, the largest relative difference with overlap, the decisions)."""
    function, options = GRAPHS[name], {"overlap": "force", "split": "off", "inner": "aot_eager"}
    expected = _outputs(function(*inputs))
    torch._dynamo.reset()
    mark = HISTORY.mark()
    with uncached():
        run = torch.compile(function, backend="ub_overlap", options=options, dynamic=dynamic)
        overlapped = _outputs(run(*inputs))
        decisions = [d for p in HISTORY.since(mark) for d in p.decisions]
        torch._dynamo.reset()
        no_overlap = {**options, "overrides": {"*": "none"}}
        plain = _outputs(torch.compile(function, backend="ub_overlap", options=no_overlap, dynamic=dynamic)(*inputs))
    pairs = [(a.double(), b.double()) for a, b in zip(overlapped, expected, strict=True)]
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return all(map(torch.equal, plain, expected)), difference, decisions


def graphs(rank: int, world: int) -> dict[tuple[str, bool], tuple[bool, float, list[Decision]]]:
    """Return the results by (name, with dynamic shapes)."""
    inputs = operands(rank)
    results = {(name, False): graph(name, inputs) for name in GRAPHS}
    return results | {(name, True): graph(name, inputs, True) for name in ("rows", "dim1")}


def _outputs(x: Any) -> Inputs:
    return (x,) if isinstance(x, Tensor) else x
