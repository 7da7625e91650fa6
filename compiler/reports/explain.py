"""ub_overlap.explain(model, options)(*args, **kwargs): every collective's decision, like torch._dynamo.explain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import verify
from ub_overlap.runtime.fp8 import amax_history
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.runtime.stats import site_stats

from ..cost.profile_lookup import load
from ..options import Options
from .history import HISTORY
from .measured import measure_sites
from .report import Report


def explain(
    model: Callable[..., Any], options: Mapping[str, Any] | None = None, *, measure: bool = False
) -> Callable[..., Report]:
    """Compile `model` (a module or function, compiled or not), run it once and report every collective.

    `measure`: run it three more times with tracing, and report the measured time of each site next to the predicted one.
    With `fp8` it is then compiled once more, and each float8 matmul also runs in 16 bits. `Report.casts` and
    `Report.float8()` show the difference.

    Compile caches are bypassed. All ranks of the model's groups must call it together. The forward runs once. If an output
    needs a gradient, so does the backward, through torch.autograd.grad, so that no .grad changes. Buffers that a forward
    updates are updated; the amax history of delayed scaling is not.
    """
    plain = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model

    def run(*args: Any, **kwargs: Any) -> Report:
        before = site_stats()
        mark = HISTORY.mark()

        def once(compiled: Callable[..., Any]) -> None:
            leaves = compat.tree_leaves(compiled(*args, **kwargs))
            outputs = [o for o in leaves if isinstance(o, torch.Tensor) and o.requires_grad]
            if outputs:
                seeds = [torch.ones_like(o) for o in outputs]
                torch.autograd.grad(outputs, _leaves(outputs), seeds, allow_unused=True)

        # With caches, a hit would run no pass, and a graph without sites would not be reported.
        with _own_state(options or {}) as own, compat.caches_off():
            compiled = torch.compile(plain, backend="ub_overlap", options=own or None)
            once(compiled)
            plans = HISTORY.since(mark)
            sites = [str(SiteId(p.digest, d.id)) for p in plans for d in p.decisions if d.overlapped]
            measured = measure_sites(lambda: once(compiled), sites) if measure else {}
            errors: dict[str, verify.SiteError] | None = None
            if measure and any(c.recipe for p in plans for c in p.casts):
                with verify.FLOAT8.record_separately() as errors:
                    once(torch.compile(plain, backend="ub_overlap", options={**own, "verify": True}))
        profile = own.get("profile")
        return Report(plans, before, load(profile) if profile is not None else None, measured, errors)

    return run


@contextlib.contextmanager
def _own_state(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The options with a copy of the amax history of delayed scaling, so that `explain` does not change the training's."""
    fp8 = Options(fp8=options.get("fp8")).fp8  # type: ignore[arg-type]
    if fp8.recipe != "delayed":
        yield dict(options)
        return
    with amax_history.copy_state(fp8.state) as name:
        yield {**options, "fp8": replace(fp8, state=name)}


def _leaves(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose .grad a backward from `outputs` would set."""
    leaves = [o for o in outputs if o.grad_fn is None]
    todo, seen = [o.grad_fn for o in outputs], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        todo += [n for n, _ in node.next_functions]
    return leaves
