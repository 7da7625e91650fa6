"""ub_overlap.explain(model, options)(*args, **kwargs): what was overlapped, and why not the rest.

The form of torch._dynamo.explain.
"""

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
from .measured import measure as measure_sites
from .report import Report


def explain(
    model: Callable[..., Any], options: Mapping[str, Any] | None = None, *, measure: bool = False
) -> Callable[..., Report]:
    """Compiles `model` (a module or function, compiled or not), runs it once and reports every collective.

    `measure`: runs it three times more, with tracing on, and reports what each site took beside what was predicted. With `fp8`
    it is then compiled once more to run each float8 product in 16 bits beside; `Report.casts` and `Report.float8()` tell how
    far the two are apart.

    Compile caches are passed by. All ranks of the model's groups must call it together. The forward runs once; where an output
    needs a gradient, so does the backward, through torch.autograd.grad, so that no .grad changes. Buffers that a forward
    updates are updated; what delayed scaling remembers is not.
    """
    plain = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model

    def run(*args: Any, **kwargs: Any) -> Report:
        before = site_stats()
        known = HISTORY.mark()

        def once(compiled: Callable[..., Any]) -> None:
            leaves = compat.tree_leaves(compiled(*args, **kwargs))
            outputs = [o for o in leaves if isinstance(o, torch.Tensor) and o.requires_grad]
            if outputs:
                seeds = [torch.ones_like(o) for o in outputs]
                torch.autograd.grad(outputs, _leaves(outputs), seeds, allow_unused=True)

        # With caches a hit would run no pass, and a graph without sites would then leave no trace.
        with _own_state(options or {}) as wish, compat.caches_off():
            compiled = torch.compile(plain, backend="ub_overlap", options=wish or None)
            once(compiled)
            plans = HISTORY.since(known)
            sites = [str(SiteId(p.digest, d.id)) for p in plans for d in p.decisions if d.overlapped]
            measured = measure_sites(lambda: once(compiled), sites) if measure else {}
            errors: dict[str, verify.SiteError] | None = None
            if measure and any(c.recipe for p in plans for c in p.casts):
                with verify.FLOAT8.apart() as errors:
                    once(torch.compile(plain, backend="ub_overlap", options={**wish, "verify": True}))
        profile = wish.get("profile")
        return Report(plans, before, load(profile) if profile is not None else None, measured, errors)

    return run


@contextlib.contextmanager
def _own_state(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Delayed scaling goes on from a copy of what the training remembers: explaining must not move it."""
    fp8 = Options(fp8=options.get("fp8")).fp8  # type: ignore[arg-type]
    if fp8.recipe != "delayed":
        yield dict(options)
        return
    with amax_history.copy_state(fp8.state) as name:
        yield {**options, "fp8": replace(fp8, state=name)}


def _leaves(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose .grad a backward from `outputs` would fill, wherever the model holds them."""
    found = [o for o in outputs if o.grad_fn is None]
    todo, seen = [o.grad_fn for o in outputs], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        todo += [n for n, _ in node.next_functions]
    return found
