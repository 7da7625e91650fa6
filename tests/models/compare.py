"""Comparison of three runs of one case: float64 eager (the reference), eager and compiled in its dtype.

All runs have the same weights.

outcome = pool2.run(compare, "tests.models.megatron", {"gather_dim": 1}, {"overlap": "force"})[0]
outcome.check()          # error of outputs and every gradient: at most `factor` times eager's
outcome.check_sites()    # rewritten sites as the model's structure requires
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.harness.later_steps import STEPS_THAT_COMPILE, compiled_before
from tests.harness.traces import as_loss
from tests.models.case import Case, Expected, Sites, on
from ub_overlap._torch_compat import caches_off as uncached

SLACK = 8  # tolerance in roundings of the dtype, for tensors on which eager is exact by chance

Values = dict[str, Tensor | None]


@dataclass(frozen=True)
class Comparison:
    """Errors by tensor as (eager, compiled), relative to the largest value of the float64 run; decisions as dicts."""

    errors: dict[str, tuple[float, float]]
    roundings: dict[str, float]
    decisions: list[dict[str, Any]]
    expected: Expected

    def check(self, factor: float = 2.0) -> None:
        """Raise AssertionError with every tensor whose compiled error is above factor * eager's + SLACK roundings."""
        bad = {n: pair for n, pair in self.errors.items() if not pair[1] <= factor * pair[0] + SLACK * self.roundings[n]}
        assert not bad, "compiled is further from float64 than eager: " + ", ".join(
            f"{n} {compiled:.3g} (eager {eager:.3g})" for n, (eager, compiled) in bad.items()
        )

    def check_sites(self) -> None:
        """Raise AssertionError if the collectives or the rewritten sites of a phase differ from the model's structure.

        Rewritten sites are not counted in phases with refused sites.
        """
        for phase, sites, why in (
            ("forward", self.expected.forward, self.expected.refused),
            ("backward", self.expected.backward, self.expected.refused_backward),
        ):
            mine = [d for d in self.decisions if d["phase"] == phase]
            found = {kind: n for kind, n in Counter(d["kind"] for d in mine if _rewritten(d)).items() if kind in _kinds(sites)}
            merged = sum(d["strategy"] == "merged" for d in mine)
            wanted = {kind: n for kind, n in _kinds(sites).items() if n}
            rows = "\n".join(f"  {d['id']} {d['kind']} {d['strategy']} {d['reason']} {d['detail']}" for d in mine)
            seen = tuple(sum(op in d["kind"] for d in mine) for op in ("all_gather", "reduce_scatter", "all_reduce"))
            there = (sites.all_gathers, sites.reduce_scatters, sites.all_reduces)
            assert seen == there, f"{phase}: {seen} all_gathers, reduce_scatters, all_reduces; structure has {there}\n{rows}"
            all_merged = sites.merged + sites.merged_scatters + sites.merged_gathers
            assert why or (found, merged) == (wanted, all_merged), (
                f"{phase}: {found}, {merged} merged; structure says {sites}\n{rows}"
            )


def _rewritten(decision: dict[str, Any]) -> bool:
    return decision["strategy"].partition(":")[0] in ("pipelined", "direct", "bulk")


def _kinds(sites: Sites) -> dict[str, int]:
    return {"all_gather_matmul": sites.gather, "matmul_reduce_scatter": sites.scatter, "matmul_all_reduce": sites.reduce}


def values(case: Case, run: Any) -> Values:
    """Return outputs and gradients of one forward and backward of `run` as local tensors.

    `run` is the case's module, compiled or not. Unreduced gradients of DTensor parameters are summed over the ranks first.
    """
    with (case.context or contextlib.nullcontext)():
        output = run(*case.inputs)
        loss = as_loss(output)
        if loss.requires_grad:
            loss.backward()
    leaves = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]
    found: Values = {f"output{i}": _local(t) for i, t in enumerate(leaves)}
    found |= {f"input{i}.grad": _local(t.grad) for i, t in enumerate(case.inputs) if isinstance(t, Tensor) and t.is_leaf}
    return found | {f"{name}.grad": _local(p.grad) for name, p in case.module.named_parameters()}


def _local(tensor: Tensor | None) -> Tensor | None:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor() if any(p.is_partial() for p in tensor.placements) else tensor.to_local()
    return None if tensor is None else tensor.detach()


def error(value: Tensor | None, truth: Tensor | None, name: str) -> float:
    """Return the largest difference relative to the reference's largest value; both tensors may be None."""
    if value is None or truth is None:
        assert value is truth, f"{name}: one run has a gradient, another none"
        return 0.0
    assert value.shape == truth.shape, f"{name}: shape {tuple(value.shape)}, eager's {tuple(truth.shape)}"
    if value.numel() == 0:
        return 0.0
    scale = truth.abs().max().item()
    return (value.double() - truth.double()).abs().max().item() / (scale or 1.0)


def compare(
    rank: int,
    world: int,
    module: str,
    variant: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    backend: str = "ub_overlap",
    fresh: bool = True,
    device: torch.device | str = "cpu",
) -> Comparison:
    """Run `module`.build(**variant) three ways on `device`; steps after the second may compile nothing.

    `fresh`: bypass compile caches, so that the passes run.
    """
    with on(device):
        return _compare(rank, world, module, variant or {}, options, backend, fresh)


def _compare(
    rank: int, world: int, module: str, variant: dict[str, Any], options: dict[str, Any] | None, backend: str, fresh: bool
) -> Comparison:
    build = importlib.import_module(module).build
    true_case: Case = build(rank, world, **variant, exact=True)
    truth = values(true_case, true_case.module)
    eager_case: Case = build(rank, world, **variant)
    eager = values(eager_case, eager_case.module)

    case: Case = build(rank, world, **variant)
    compiled = torch.compile(case.module, backend=backend, dynamic=case.dynamic, options=options or None)
    with uncached() if fresh else contextlib.nullcontext():
        mark = _mark() if backend == "ub_overlap" else 0
        ours = values(case, compiled)
        decisions = _decisions(mark) if backend == "ub_overlap" else []
        errors = {n: (error(eager[n], truth[n], n), error(ours[n], truth[n], n)) for n in truth}
        for step in range(1, STEPS_THAT_COMPILE + 1):  # they add to the gradients that `ours` has
            with compiled_before(step):
                values(case, compiled)
    roundings = {n: torch.finfo(t.dtype).eps if t is not None else 0.0 for n, t in eager.items()}
    return Comparison(errors, roundings, decisions, case.expected)


def decide_sites(rank: int, world: int, module: str, variant: dict[str, Any], options: dict[str, Any]) -> Comparison:
    """Compile a case, forward and backward, and return its decisions without errors: for ranks that do not exist."""
    case: Case = importlib.import_module(module).build(rank, world, **variant)
    with uncached():
        mark = _mark()
        values(case, torch.compile(case.module, backend="ub_overlap", dynamic=case.dynamic, options=options))
    return Comparison({}, {}, _decisions(mark), case.expected)


def _mark() -> int:
    from ub_overlap.compiler.reports.history import HISTORY

    return HISTORY.mark()


def _decisions(mark: int) -> list[dict[str, Any]]:
    from ub_overlap.compiler.reports.history import HISTORY
    from ub_overlap.compiler.reports.report import Report

    return [d.to_dict() for d in Report(HISTORY.since(mark)).decisions]
