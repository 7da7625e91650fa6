"""ub_overlap.explain(model, options)(*args, **kwargs): what was overlapped, and why not the rest.

The form of torch._dynamo.explain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.stats import site_stats

from .history import HISTORY
from .report import Report


def explain(model: Callable[..., Any], options: Mapping[str, Any] | None = None) -> Callable[..., Report]:
    """Compiles `model` (a module or function, compiled or not), runs it once and reports every collective.

    All ranks of the model's groups must call it together. The forward runs once; where an output needs a
    gradient, so does the backward, through torch.autograd.grad, so that no .grad changes. Buffers that a forward updates are
    updated.
    """
    plain = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model

    def run(*args: Any, **kwargs: Any) -> Report:
        before = site_stats()
        known = HISTORY.mark()
        compiled = torch.compile(plain, backend="ub_overlap", options=dict(options) if options else None)
        outputs = [o for o in compat.tree_leaves(compiled(*args, **kwargs)) if isinstance(o, torch.Tensor) and o.requires_grad]
        if outputs:
            leaves = compat.tree_leaves((args, kwargs))
            inputs = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad]
            if isinstance(plain, torch.nn.Module):
                inputs += [p for p in plain.parameters() if p.requires_grad]
            seeds = [torch.ones_like(o) for o in outputs]
            torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
        plans = {p.digest: p for p in HISTORY.since(known)}
        # A warm compile cache runs no pass: the ops name the plans.
        ran = (s.partition("/")[0] for s, now in site_stats().items() if s not in before or now.calls > before[s].calls)
        plans |= {p.digest: p for p in HISTORY.found(d for d in ran if d not in plans)}
        return Report(list(plans.values()), since=before)

    return run
