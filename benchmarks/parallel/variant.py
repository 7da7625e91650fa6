"""A variant: a model with its input and one way to run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.reports.outlook import totals
from ub_overlap.compiler.reports.report import Report
from ub_overlap.tools.rank_process import World

COMPUTE, EAGER, INDUCTOR = "compute", "eager", "inductor"


@dataclass
class ParallelVariant:
    """A model with its input. `sites`: by strategy, how our backend runs its collectives."""

    has_forward: ClassVar[bool] = True
    """Whether its forward can run alone."""

    name: str
    model: nn.Module
    call: Any
    x: Tensor
    grad: Tensor
    sites: str = ""
    digests: tuple[str, ...] = ()
    """Of its plans."""
    predicted: Mapping[str, float] = field(default_factory=dict)
    """What its plans predict for a step: `predict_step`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Switches of torch that it uses, for the table."""

    def step(self) -> None:
        """Run forward and backward; gradients accumulate."""
        self.call(self.x).backward(self.grad)

    def first_step(self, world: World) -> ParallelVariant:
        """Run the step that compiles, and note what our backend decided in it. Return the variant."""
        mark = HISTORY.mark()
        self.step()
        plans = HISTORY.since(mark)
        self.digests = tuple(plan.digest for plan in plans)
        self.predicted = predict_step(plans)
        strategies = Counter(str(d.strategy).partition(":")[0] for plan in plans for d in plan.decisions)
        self.sites = ", ".join(f"{count} {strategy}" for strategy, count in sorted(strategies.items()))
        world.sync()
        return self

    def forward(self) -> None:
        with torch.no_grad():
            self.call(self.x)

    def results(self) -> dict[str, Tensor]:
        """Return output and gradients of one step with cleared gradients."""
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None
        out = self.call(self.x)
        out.backward(self.grad)
        grads = {"input": self.x.grad, **{name: _local(p.grad) for name, p in self.model.named_parameters()}}
        return {"output": out.detach(), **{name: g.detach().clone() for name, g in grads.items() if g is not None}}


def predict_step(plans: list[Plan]) -> dict[str, float]:
    """Return what the collectives of plans expose, and save against no overlap, in milliseconds; and sites without prediction.

    Nothing without plans.
    """
    outlooks = [decision.outlook for decision in Report(plans).decisions]
    sums = totals(outlooks)
    exposed_us = sum(o.exposed_us for o in outlooks if o is not None)
    times = {"exposed_ms": exposed_us / 1e3, "saved_ms": (sums.none_us - sums.chosen_us) / 1e3, "unknown": sums.unknown}
    return times if outlooks else {}


def differences(variant: ParallelVariant, reference: ParallelVariant, world: World) -> dict[str, float]:
    """Return ||a - b|| / ||b|| of the output and of each gradient that both have in one form, of the worst rank."""
    mine, true = variant.results(), reference.results()
    names = [n for n in mine if n in true and mine[n].shape == true[n].shape]
    errors = [float((mine[n].double() - true[n].double()).norm() / true[n].double().norm().clamp(min=1e-30)) for n in names]
    return dict(zip(names, world.worst(errors), strict=True))


def backend(name: str, compiler: str, ours: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of torch.compile for a variant: ours with the options of that name, otherwise `compiler`."""
    if name not in ours:
        return {"backend": compiler}
    inner = {"inner": "aot_eager"} if compiler == "aot_eager" else {}
    return {"backend": "ub_overlap", "options": {**ours[name], **inner}}


def _local(grad: Tensor | None) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad
