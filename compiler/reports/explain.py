"""ub_overlap.explain(model, options)(*args, **kwargs): every collective's decision, like torch._dynamo.explain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import verify
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.fp8 import amax_history
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.runtime.stats import site_stats

from ..cost.profile_lookup import load
from ..options import Options
from ..traced.apply_passes import plan_digest
from .history import HISTORY
from .isolated_compile import CompiledPart, compiled_parts, isolated_compiler
from .measured import measure_sites
from .report import Report


def explain(
    model: Callable[..., Any], options: Mapping[str, Any] | None = None, *, measure: bool = False
) -> Callable[..., Report]:
    """Compile `model` (a module or function, compiled or not), run it once and report every collective.

    `options`: None is those that it was compiled with. If only submodules are compiled by this backend, these are explained.
    `measure`: run it three more times with tracing, and report the measured time of each site next to the predicted
    one. With `fp8` it is then compiled once more, and each float8 matmul also runs in 16 bits. `Report.casts` and
    `Report.float8()` show the difference.

    The model is compiled apart from what this process has compiled: no cache is read, and no compiled code is changed. All
    ranks of the model's groups must call it together. The forward runs once. If an output needs a gradient, so does the
    backward, through torch.autograd.grad, so that no .grad changes. Buffers that a forward updates are updated; the amax
    history of delayed scaling is not. A graph that `apply_passes` has rewritten is run as it is, on tensors.
    """
    if (digest := plan_digest(model)) is not None:
        return _explain_rewritten(model, digest, options, measure)
    parts = compiled_parts(model)
    parts = [replace(p, options=options if options is not None else p.options) for p in parts]

    def run(*args: Any, **kwargs: Any) -> Report:
        before = site_stats()
        mark = HISTORY.mark()

        def once(function: Callable[..., Any]) -> None:
            leaves = compat.tree_leaves(function(*args, **kwargs))
            outputs = [o for o in leaves if isinstance(o, torch.Tensor) and o.requires_grad]
            if outputs:
                seeds = [torch.ones_like(o) for o in outputs]
                torch.autograd.grad(outputs, _leaves(outputs), seeds, allow_unused=True)

        with _own_state(parts) as own, isolated_compiler() as compiler:
            with compiler.installed(model, own) as function:
                once(function)
                plans = HISTORY.since(mark)
                sites = [str(SiteId(p.digest, d.id)) for p in plans for d in p.decisions if d.overlapped]
                measured = measure_sites(lambda: once(function), sites) if measure else {}
            errors: dict[str, verify.SiteError] | None = None
            if measure and any(c.recipe for p in plans for c in p.casts):
                verified = [replace(p, options={**(p.options or {}), "verify": True}) for p in own]
                with verify.FLOAT8.record_separately() as errors, compiler.installed(model, verified) as function:
                    once(function)
        profiles = [p.options["profile"] for p in own if p.options and p.options.get("profile") is not None]
        return Report(plans, before, load(profiles[0]) if profiles else None, measured, errors, HISTORY.token_splits(mark))

    return run


def _explain_rewritten(
    graph: Callable[..., Any], digest: str, options: Mapping[str, Any] | None, measure: bool
) -> Callable[..., Report]:
    """Return `explain` of a graph that `apply_passes` has rewritten. `digest`: of its plan; "" without collectives."""
    if options is not None:
        raise OptionError(
            what="a graph that was rewritten keeps its options",
            where="ub_overlap.explain(graph, options)",
            got=repr(dict(options)),
            fix="trace the graph again, and give the options to ub_overlap.apply_passes",
        )

    def run(*args: Any) -> Report:
        before = site_stats()

        def once() -> None:
            with torch.no_grad():  # the graph holds its backward
                graph(*args)

        once()
        plans = HISTORY.find_all([digest] if digest else [])
        sites = [str(SiteId(p.digest, d.id)) for p in plans for d in p.decisions if d.overlapped]
        return Report(plans, before, measured=measure_sites(once, sites) if measure else {})

    return run


@contextlib.contextmanager
def _own_state(parts: Sequence[CompiledPart]) -> Iterator[list[CompiledPart]]:
    """The parts with a copy of the amax history of delayed scaling, so that `explain` does not change the training's."""
    with contextlib.ExitStack() as stack:
        copies: dict[str, str] = {}
        own = []
        for part in parts:
            fp8 = Options(fp8=(part.options or {}).get("fp8")).fp8  # type: ignore[arg-type]
            if fp8.recipe == "delayed":
                if fp8.state not in copies:
                    copies[fp8.state] = stack.enter_context(amax_history.copy_state(fp8.state))
                part = replace(part, options={**(part.options or {}), "fp8": replace(fp8, state=copies[fp8.state])})
            own.append(part)
        yield own


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
