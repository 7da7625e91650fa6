"""Rank functions of test_fused.py: forms of fused_forms.py, compiled and compared with eager."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.compiler import fused_forms
from tests.compiler.form_parts import COLS, Form
from tests.compiler.fused_forms import FORMS, parallel
from tests.models.compare import uncached
from ub_overlap.compiler.cost.profile_lookup import load
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.reports.outlook import outlook
from ub_overlap.runtime import settings


def inputs(rank: int, world: int, dtype: torch.dtype, batch: int = 2) -> tuple[Tensor, ...]:
    def tensor(*sizes: int, seed: int) -> Tensor:
        return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return (
        tensor(batch, 3, 8, seed=rank), tensor(8, COLS, seed=10 + rank), tensor(batch, 3, COLS, seed=20), tensor(COLS, seed=21),
        tensor(COLS, seed=22),
    )  # fmt: skip


def flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def run_form(rank: int, world: int, name: str, strategy: str, inner: str, narrow: bool = True) -> dict[str, Any]:
    """Compile a form with the strategy requested. Return the fused parts of its op, and the difference from eager."""
    function = FORMS[name].form if name in FORMS else getattr(fused_forms, name)
    args = inputs(rank, world, torch.bfloat16 if narrow else torch.float32)
    return compare(function, args, {"overrides": [{"strategy": strategy}], "inner": inner})


def run_unmerged(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Compile `parallel` with its two collectives as they are: merged they would be one."""
    settings.configure(merge_collectives=False)
    try:
        return compare(parallel, inputs(rank, world, torch.bfloat16), {"inner": "aot_eager", **options})
    finally:
        settings.configure(merge_collectives=True)


def run_auto(rank: int, world: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same with predictions by a profile, by default that of an H200."""
    options = {"profile": "h200", "inner": "aot_eager", **options}
    return compare(FORMS[name].form, inputs(rank, world, torch.bfloat16), options)


def run_batches(rank: int, world: int, name: str, batches: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Compile a form once with a dynamic batch, and call it with each of `batches`, the first as traced."""
    function = FORMS[name].form
    mark = HISTORY.mark()
    run = torch.compile(function, backend="ub_overlap", options={"profile": "h200", "inner": "aot_eager", **options})
    same = []
    with uncached(), torch.no_grad():
        for batch in batches:
            args = inputs(rank, world, torch.float32, batch)
            if batch == batches[0]:
                for tensor in (args[0], args[2]):
                    torch._dynamo.mark_dynamic(tensor, 0)
            expected, got = flat(function(*args)), flat(run(*args))
            same.append(all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True)))
    plans = HISTORY.since(mark)
    return {"strategies": [str(d.strategy) for plan in plans for d in plan.decisions], "same": same}


def compare(function: Form, args: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Compile and run a function. Return its decisions, and the difference from eager."""
    mark = HISTORY.mark()
    with uncached(), torch.no_grad():
        expected = flat(function(*(a.clone() for a in args)))  # a form may overwrite its residual
        wide = flat(function(*(a.double() for a in args)))
        got = flat(torch.compile(function, backend="ub_overlap", options=options)(*(a.clone() for a in args)))
    decisions = [d for plan in HISTORY.since(mark) for d in plan.decisions]
    far = [float((a.double() - b.double()).abs().max()) for a, b in zip(got, wide, strict=True)]
    plain = [float((a.double() - b.double()).abs().max()) for a, b in zip(expected, wide, strict=True)]
    return {
        "strategies": [str(d.strategy) for d in decisions],
        "details": [d.detail for d in decisions],
        "reasons": [d.reason.value if d.reason else "" for d in decisions],
        "outlooks": [outlook(Decision.from_dict(d.to_dict()), load(options.get("profile", "h200"))) for d in decisions],
        "far": far,
        "plain": plain,
        "same": [a.dtype == b.dtype and a.shape == b.shape for a, b in zip(got, expected, strict=True)],
    }
