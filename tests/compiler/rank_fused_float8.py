"""Rank functions of test_fused_float8.py: casts to float8 behind a norm, as recipes spell them, and look-alikes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.compiler.form_parts import COLS, Form, hf_rms, reduced
from tests.compiler.rank_fused import compare, inputs
from tests.models.compare import uncached
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime.fp8.numerics import E4M3, E5M2, LEAST_SCALE

F = 448.0


def normed(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = reduced(x, w) + residual
    return hf_rms(hidden, weight), hidden


def cast(rows: Tensor, scale: Tensor, limit: float = F, divides: bool = False, format: torch.dtype = E4M3) -> Tensor:
    """Return the rows as a float8 cast leaves them. float64 rows are exact."""
    if rows.dtype is torch.float64:
        return rows
    wide = rows.float() / scale if divides else rows.float() * scale.reciprocal()
    return wide.clamp(-limit, limit).to(format).float() * scale


def own_rows(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The recipe "rowwise" (compiler/fp8/cast_nodes.py)."""
    rows, hidden = normed(x, w, residual, weight)
    scale = (rows.abs().amax(-1, keepdim=True).float() * (1.0 / F)).clamp_min(LEAST_SCALE)
    return cast(rows, scale), hidden


def vllm_rows(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """vLLM's QuantFP8.forward_native with a scale per token: rows of a matrix, and the values of a max."""
    rows, hidden = normed(x, w, residual, weight)
    tokens = rows.reshape(-1, COLS)
    most, _ = tokens.abs().max(dim=-1)
    scale = (most.unsqueeze(-1).to(torch.float32) / F).clamp(min=1.0 / (F * 512.0))
    return cast(tokens, scale), hidden


def divided_rows(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """torchao divides by the scale. Its amax is of numbers in fp32."""
    rows, hidden = normed(x, w, residual, weight)
    scale = (rows.float().abs().amax(-1, keepdim=True) / F).clamp(min=1e-12)
    return cast(rows, scale, divides=True), hidden


def one_scale(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A static scale of the tensor."""
    rows, hidden = normed(x, w, residual, weight)
    return cast(rows, bias[:1].float().abs() + 0.01), hidden


def wide_format(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    rows, hidden = normed(x, w, residual, weight)
    return cast(rows, bias[0].float().abs() + 0.01, 57344.0, format=E5M2), hidden


def all_rows(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The recipe "tensorwise": the amax of all rows."""
    rows, hidden = normed(x, w, residual, weight)
    scale = (rows.abs().amax().float() * (1.0 / F)).clamp_min(LEAST_SCALE)
    return cast(rows, scale), hidden


def rows_read(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A router reads the rows in 16 bits."""
    rows, _ = normed(x, w, residual, weight)
    return cast(rows, bias[:1].float().abs() + 0.01), rows * 2


def columns(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """A scale per column."""
    rows, _ = normed(x, w, residual, weight)
    return cast(rows, (rows.abs().amax(1, keepdim=True).float() * (1.0 / F)).clamp_min(LEAST_SCALE))


def not_clamped(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Other bounds than the format's."""
    rows, _ = normed(x, w, residual, weight)
    return cast(rows, bias[:1].float().abs() + 0.01, limit=240.0)


def clamped_above(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """Numbers below the format's range become NaN there, and its least number in a kernel that clamps."""
    rows, _ = normed(x, w, residual, weight)
    if rows.dtype is torch.float64:
        return rows
    scale = bias[:1].float().abs() + 0.01
    return (rows.float() * scale.reciprocal()).clamp(max=F).to(E4M3).float() * scale


def zero_row(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """The amax of a row of zeros has no reciprocal."""
    rows, _ = normed(x, w, residual, weight)
    return cast(rows, rows.abs().amax(-1, keepdim=True).float() * (1.0 / F))


FORMS: dict[str, tuple[Form, str]] = {
    "own_rows": (own_rows, ""),
    "vllm_rows": (vllm_rows, ""),
    "divided_rows": (divided_rows, ""),
    "one_scale": (one_scale, ""),
    "wide_format": (wide_format, ""),
    "all_rows": (all_rows, "its scale is computed from all rows of the norm"),
    "rows_read": (rows_read, "the norm's result has other readers"),
    "columns": (columns, "no"),
    "not_clamped": (not_clamped, "no"),
    "clamped_above": (clamped_above, "no"),
    "zero_row": (zero_row, "no"),
}
"""By name: the function, and why the cast is not part of the op: "" where it is, "no" where the report does not say."""


def run_form(rank: int, world: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Compile a form, with a strategy requested or a profile. Return what is fused, and the difference from eager."""
    requested = {} if "profile" in options else {"overrides": [{"strategy": "one_shot"}]}
    options = {"inner": "aot_eager", **requested, **options}
    return compare(FORMS[name][0], inputs(rank, world, torch.bfloat16), options)


class Layer(nn.Module):
    """A row-parallel product, the residual, the norm, and two linears that read it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.gate = (nn.Linear(COLS, 32, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        rows, hidden = normed(x, w, residual, weight)
        return torch.cat([self.up(rows) * self.gate(rows), hidden], -1)


def run_recipe(rank: int, world: int, recipe: str) -> dict[str, Any]:
    """Compile a layer with the option fp8. Return its decisions and its error relative to 16 bits."""
    model, args = Layer(), inputs(rank, world, torch.bfloat16)[:4]
    model.requires_grad_(False)
    mark = HISTORY.mark()
    options = {"overrides": [{"strategy": "one_shot"}], "inner": "aot_eager", "fp8": {"recipe": recipe}}
    with uncached(), torch.no_grad():
        expected = model(*args).float()
        got = torch.compile(model, backend="ub_overlap", options=options)(*args).float()
    plans = HISTORY.since(mark)
    return {
        "details": [d.detail for plan in plans for d in plan.decisions if d.strategy.is_fused],
        "casts": sum(cast.reason is None for plan in plans for cast in plan.casts),
        "error": float((got - expected).norm() / expected.norm()),
    }
